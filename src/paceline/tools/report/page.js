"use strict";
// Unpacks plotly, draws the figures that are visible, and redraws them when what is wanted changes.
// Notes on <html>: data-drawn, the milliseconds until all was drawn, or data-failed, why nothing was.
(async () => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const figures = JSON.parse(byId("figures").textContent);
  const chosen = { x: "step" };
  const isPhone = matchMedia("(max-width: 640px)");
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const isTouched = matchMedia("(pointer: coarse)").matches;

  function fail(why) {
    root.dataset.failed = why;
    const notice = byId("no-plots");
    notice.textContent = `The plots could not be drawn: ${why}. The figures in words and tables are complete.`;
    notice.hidden = false;
    for (const plot of document.querySelectorAll(".plot")) plot.hidden = true;
  }

  async function unpack(id) {
    const packed = atob(byId(id).textContent);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // "var(--name)" and "var(--name / 0.2)" become the colours that the style sheet has for them now.
  function coloured(value, style) {
    if (typeof value === "string") {
      const found = /^var\((--[a-z0-9]+)(?: \/ ([0-9.]+))?\)$/.exec(value);
      if (!found) return value;
      const colour = style.getPropertyValue(found[1]).trim();
      const opacity = Math.round(255 * Number(found[2] ?? 1));
      return colour + opacity.toString(16).padStart(2, "0");
    }
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value && typeof value === "object") return painted(value, style);
    return value;
  }

  function painted(object, style) {
    const plain = ["x", "y", "meta", "customdata", "hovertext", "text", "name", "legendgroup"]; // never colours
    const result = {};
    for (const [name, value] of Object.entries(object)) {
      result[name] = plain.includes(name) ? value : coloured(value, style);
    }
    return result;
  }

  function traceOf(trace, view, style) {
    const { meta, ...made } = painted(trace, style);
    if (meta?.xs) made.x = meta.xs[chosen.x];
    if (meta?.zs) Object.assign(made, { z: meta.zs[view], zmax: meta.zmaxs[view] });
    if (made.colorbar) made.colorbar.tickfont = { color: style.getPropertyValue("--muted").trim() };
    return made;
  }

  function layoutOf(figure, place, view, style) {
    const colour = (name) => style.getPropertyValue(name).trim();
    const size = isPhone.matches ? 12 : 13;
    const axis = {
      automargin: true, zeroline: false, gridcolor: colour("--line"), linecolor: colour("--line"),
      tickcolor: colour("--line"), ticklen: 5, title: { standoff: 10, font: { size } }, hoverformat: "",
      fixedrange: isTouched,
    };
    const own = painted(figure.layout, style);
    const merged = (given) => ({ ...axis, ...given, title: { ...axis.title, ...(given?.title ?? {}) } });
    const xaxis = { ...axis, showgrid: false, showline: true, ticks: "outside", ...own.xaxis };
    xaxis.title = { ...axis.title, ...(own.xaxis?.title ?? {}) };
    if (figure.traces.some((trace) => trace.meta?.xs)) Object.assign(xaxis, figures.axes[chosen.x], {
      title: { ...axis.title, ...figures.axes[chosen.x].title },
    });
    if (isPhone.matches) xaxis.nticks = 5;
    const layout = {
      showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, size, color: colour("--muted") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 10, r: 14, t: 12, b: 10, ...(own.margin ?? {}) },
      hovermode: "x unified", dragmode: isTouched ? false : "zoom", width: place.clientWidth, height: figure.height,
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--ink"), size }, align: "left" },
    };
    Object.assign(layout, own, { margin: layout.margin, xaxis });
    layout.yaxis = merged(own.yaxis);
    if (view === "close") layout.yaxis.range = figure.closeUp;
    if (isPhone.matches) layout.yaxis.title = { text: "" };
    return layout;
  }

  async function draw(figure) {
    const place = byId(figure.id);
    if (place.closest("[hidden]")) return;
    const style = getComputedStyle(root);
    const view = document.querySelector(`input[name="view-${figure.id}"]:checked`)?.value;
    const traces = figure.traces.map((trace) => traceOf(trace, view, style));
    const options = { displayModeBar: false, doubleClick: "reset", showTips: false };
    for (const trace of traces) if (figure.off?.has(trace.name)) trace.visible = "legendonly";
    const layout = layoutOf(figure, place, view, style);
    await Plotly.react(place, traces, layout, options);
    // Paper is narrower than the window: there the style sheet scales what was drawn.
    place.style.setProperty("--shape", `${layout.width} / ${layout.height}`);
    for (const svg of place.querySelectorAll(".main-svg")) svg.setAttribute("viewBox", `0 0 ${layout.width} ${layout.height}`);
    if (!place.previousElementSibling?.matches(".legend")) place.before(legendOf(figure));
  }

  // A button for each name: what is pressed is drawn.
  function legendOf(figure) {
    const legend = document.createElement("div");
    legend.className = "legend";
    const named = figure.traces.filter((trace) => trace.name && trace.showlegend !== false);
    figure.off = new Set();
    if (named.length > 1) legend.append(...named.map((trace) => buttonOf(figure, trace)));
    return legend;
  }

  function buttonOf(figure, trace) {
    const button = document.createElement("button");
    const swatch = document.createElement("span");
    const line = trace.stackgroup || trace.type === "bar" ? "solid" : (trace.line?.dash ?? "solid");
    swatch.className = `swatch ${line}`;
    const ink = trace.fillcolor ?? trace.line?.color ?? trace.marker?.color;
    swatch.style.color = ink;
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.append(swatch, new DOMParser().parseFromString(trace.name, "text/html").documentElement.textContent);
    button.addEventListener("click", () => {
      const isOff = !figure.off.delete(trace.name);
      if (isOff) figure.off.add(trace.name);
      button.setAttribute("aria-pressed", String(!isOff));
      inTurn(() => draw(figure));
    });
    return button;
  }

  const pause = () => new Promise((resolve) => setTimeout(resolve));

  async function drawAll(which = () => true) {
    for (const figure of figures.list.filter(which)) {
      await draw(figure);
      await pause(); // what is drawn can be read while the rest is made
    }
  }

  // One drawing after the other: two at a time would leave each plot in the width of whichever came to it last.
  let drawing = Promise.resolve();
  function inTurn(work) {
    const done = drawing.then(work);
    drawing = done.catch(() => {});
    return done;
  }

  let width = 0; // that all were drawn in
  async function fit() {
    for (let tries = 0; tries < 4 && root.clientWidth !== width; tries++) { // it may change while they are drawn
      width = root.clientWidth;
      await drawAll();
    }
  }

  function showRun(index) {
    for (const run of document.querySelectorAll("article.run")) run.hidden = run.dataset.run !== index;
  }

  function listen() {
    document.addEventListener("change", (event) => {
      const input = event.target;
      if (input.name === "x") {
        chosen.x = input.value;
        inTurn(() => drawAll((figure) => figure.traces.some((trace) => trace.meta?.xs)));
      } else if (input.name === "run") {
        showRun(input.value);
        inTurn(() => drawAll((figure) => figure.id.startsWith(`run${input.value}-`)));
      } else if (input.name?.startsWith("view-")) {
        inTurn(() => drawAll((figure) => input.name === `view-${figure.id}`));
      }
    });
    isDark.addEventListener("change", () => inTurn(() => drawAll()));
    addEventListener("resize", () => inTurn(fit)); // a phone's bars come and go: that changes the height alone
  }

  try {
    for (const controls of document.querySelectorAll("[data-controls]")) controls.hidden = false;
    if (document.querySelector('input[name="run"]')) showRun("0");
    if (!("DecompressionStream" in self)) return fail("this browser cannot unpack them (it is older than 2023)");
    const script = document.createElement("script");
    script.textContent = await unpack("plotly");
    document.head.append(script);
    if (!self.Plotly) return fail("this browser did not run them");
    listen();
    await inTurn(fit);
    root.dataset.drawn = String(Math.round(performance.now()));
  } catch (error) {
    fail(String(error));
  }
})();
