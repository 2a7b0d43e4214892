"use strict";
// Shows runs: those of a report, which stand in the page as JSON, or those that `paceline watch` sends,
// {now, path, runs: {index: {field: value that changed}}}. view.py says what a run has. All texts are set as text, never
// as markup. Notes on <html>: data-drawn, how often the curves were drawn; data-messages, how many messages have come.
// charts.js has the curves.
function fill(place, text) {
  place.textContent = text ?? "";
  place.hidden = !text;
}

function tableOf({ head, rows, caption }, cell = (text) => text) {
  const made = make("table", {}, make("thead", {}, make("tr", {}, ...head.map((title) => make("th", { scope: "col" }, title)))));
  if (caption) made.prepend(make("caption", {}, caption));
  made.append(make("tbody", {}, ...rows.map(([first, ...others], row) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...others.map((text, column) => make("td", {}, cell(text, row, column)))))));
  return made;
}

const named = ([head, rows, caption]) => ({ head, rows, caption });
const factOf = (run, label) => run.facts.find(([name]) => name === label);

function showHead(run) {
  const isMany = runs.length > 1;
  fill(byId("about"), isMany ? "" : run.about);
  byId("status").className = `status ${run.level}`;
  fill(byId("status"), isMany ? "" : run.said);
  const whose = (each, said) => (isMany ? `${each.name}: ${said}` : said);
  fill(byId("warning"), runs.filter((each) => each?.warning).map((each) => whose(each, each.warning)).join(" "));
  fill(byId("notice"), runs.filter((each) => each?.notices.length).map((each) => whose(each, each.notices.join(" "))).join(" "));
  const isKnown = run.frac !== null; // else the run has no horizon
  byId("progress").hidden = isMany || run.state !== "running";
  byId("progress").firstChild.hidden = !isKnown;
  byId("progress").firstChild.value = run.frac ?? 0;
  byId("progress").lastChild.textContent = `step ${run.step}${isKnown ? `, ${Math.floor(100 * run.frac)}%` : ""}`;
}

function showAge() {
  const run = runs[chosen];
  const isLive = !isReport && runs.length === 1 && run?.updated_s && run.state === "running";
  fill(byId("age"), isLive ? `newest record ${duration(Math.max(0, (Date.now() + ahead) / 1000 - run.updated_s))} ago` : "");
}

function showFacts(run) {
  byId("answer").classList.toggle("wide", runs.length > 1);
  byId("facts").hidden = runs.length > 1;
  const large = ["Loss", run.state === "running" ? "Time left" : "Validation loss", "Throughput"];
  const facts = run.facts.map(([label, value, note]) => {
    const parts = [make("dt", {}, label), make("dd", { class: "value" }, value), ...(note ? [make("dd", { class: "note" }, note)] : [])];
    return make("div", large.includes(label) ? { class: "large" } : {}, ...parts);
  });
  const isLarge = (fact) => fact.className === "large";
  byId("facts").replaceChildren(...facts.filter(isLarge), ...facts.filter((fact) => !isLarge(fact)));
}

function showRuns() {
  const place = byId("runs");
  place.hidden = runs.length < 2;
  if (place.hidden) return;
  const counted = runs.map((run) => run.unit.charAt(0).toUpperCase() + run.unit.slice(1).toLowerCase());
  const labels = ["Loss", "Validation loss", "Throughput", "Step", "MFU", "Time left", ...new Set(counted), "Training time", "Ranks", "Restarts", "Stragglers cost"];
  const known = labels.filter((label) => runs.some((run) => factOf(run, label)));
  const shown = (run, label) => (factOf(run, label) ?? []).slice(1, label === "Throughput" ? 3 : 2).join(" ");
  const head = ["run", "state", "step", ...known.map((label) => label.toLowerCase())];
  const rows = runs.map((run, index) => [nameOf(run, index), run.said, run.step, ...known.map((label) => shown(run, label))]);
  const isFocused = place.contains(document.activeElement);
  const table = tableOf({ head, rows });
  table.querySelectorAll("tbody tr").forEach((row, index) => row.children[1].classList.add(runs[index].level));
  place.querySelector(".scroll").replaceChildren(table);
  if (isFocused) table.querySelector("input:checked").focus();
  showDifferences();
}

function nameOf(run, index) {
  const input = make("input", { type: "radio", name: "run", value: index });
  input.checked = index === chosen;
  const swatch = make("span", { class: `swatch dash${dashOf(index)}` });
  swatch.style.color = `var(--${runInk(index)})`;
  return make("label", {}, input, swatch, run.name);
}

function showDifferences() { // marked: what differs from the first run
  const fields = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const differing = fields.filter((field) => new Set(runs.map((run) => run.config[field])).size > 1);
  const place = byId("differences");
  const isOne = differing.length === 1;
  place.querySelector("summary").textContent = differing.length
    ? `${differing.length} ${isOne ? "setting" : "settings"} of their configs ${isOne ? "differs" : "differ"}` : "Their configs are equal.";
  const rows = differing.map((field) => [field, ...runs.map((run) => run.config[field] ?? "-")]);
  const cell = (text, row) => (text === rows[row][1] ? make("code", {}, text) : make("mark", {}, make("code", {}, text)));
  place.querySelector(".scroll").replaceChildren(...(rows.length ? [tableOf({ head: ["", ...runs.map((run) => run.name)], rows }, cell)] : []));
}

function showFindings(run) {
  for (const place of all("[data-finding]")) {
    const topic = place.dataset.finding;
    const isCommon = ["loss", "rate", "update"].includes(topic) && runs.length > 1;
    const said = isCommon ? runs.filter((each) => each.findings[topic]).map((each) => make("span", {}, `${each.name}: ${each.findings[topic]}`, make("br"))) : [run.findings[topic] ?? ""];
    place.replaceChildren(...(isCommon && runs.length > 4 ? [] : said));
  }
  for (const place of all("[data-table]")) {
    const table = run.tables[place.dataset.table];
    place.hidden = !table;
    if (!table) continue;
    const shown = make("div", { class: "scroll" }, tableOf(named(table)));
    const title = place.dataset.table === "loss" ? "Loss in figures" : "In figures";
    if (place.localName === "details") place.replaceChildren(make("summary", {}, title), shown);
    else place.replaceChildren(shown);
  }
}

function showRanks(run) {
  const place = byId("ranks");
  place.hidden = run.ranks.length < 2 && !run.heat.steps && !run.findings.ranks;
  const total = (rank) => Object.values(rank.parts).reduce((sum, ms) => sum + Math.max(0, ms), 0);
  const longest = Math.max(...run.ranks.map(total));
  const rows = run.ranks.map((rank) => {
    const parts = PARTS.filter((part) => rank.parts[part]).map((part) => {
      const made = make("span", { title: `${part}: ${exact.format(rank.parts[part])} ms` });
      made.style.width = `${(100 * Math.max(0, rank.parts[part])) / longest}%`;
      made.style.background = `var(--${partInk(part)})`;
      return made;
    });
    const label = `${rank.rank}${rank.host ? ` · ${rank.host}` : ""}`;
    const name = make("span", { title: label }, label, make("span", { class: "wide" }, rank.is_slow ? " slow" : ""));
    const work = make("span", {}, make("span", { class: "wide" }, "works "), `${exact.format(Number(rank.work_ms.toPrecision(3)))} ms`);
    return make("li", rank.is_slow ? { class: "slow" } : {}, name, make("div", { class: "bar" }, ...parts), work);
  });
  place.querySelector(".bars").replaceChildren(...rows);
  place.querySelector(".legend").replaceChildren(...PARTS.filter((part) => run.ranks.some((rank) => rank.parts[part])).map((part) => {
    const swatch = make("span", { class: "swatch area" });
    swatch.style.color = `var(--${partInk(part)})`;
    return make("span", {}, swatch, part);
  }));
  fill(byId("others"), run.other_ranks);
  byId("heat").hidden = !run.heat.steps;
  if (run.heat.steps) showHeat(run.heat);
}

function rgb(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function showHeat(heat) {
  const isMost = heat.most.length > 0 && document.querySelector("input[name=heat]:checked").value === "most";
  byId("heat").querySelector("fieldset").hidden = !heat.most.length;
  const columns = isMost ? heat.most : heat.mean;
  const [width, height] = [columns.length, heat.labels.length];
  const values = columns.flat().filter((value) => value !== null).sort((a, b) => a - b);
  const top = Math.max(0.5, values[Math.floor(0.995 * values.length)] ?? 0); // one slow step must not make all others pale
  const shades = [0, 1, 2, 3].map((shade) => rgb(colourOf(`heat${shade}`)));
  const canvas = byId("heat").querySelector("canvas");
  [canvas.width, canvas.height] = [width, height];
  canvas.style.height = `${Math.min(480, Math.max(height * 6, Math.min(22, 160 / height) * height))}px`;
  const image = new ImageData(width, height);
  columns.forEach((column, x) => column.forEach((value, y) => {
    if (value === null) return;
    const place = 3 * Math.min(1, value / top);
    const [below, part] = [Math.min(2, Math.floor(place)), place - Math.min(2, Math.floor(place))];
    const colour = shades[below].map((each, channel) => each + part * (shades[below + 1][channel] - each));
    image.data.set([...colour, 255], 4 * (y * width + x));
  }));
  canvas.getContext("2d").putImageData(image, 0, 0);
  const every = Math.ceil(height / 16);
  byId("heat").querySelector(".labels").replaceChildren(...heat.labels.map((label, rank) => {
    const [number, ...host] = label.split(" ");
    const made = make("span", {}, number, make("span", { class: "wide" }, ` ${host.join(" ")}`));
    made.style.top = `${(100 * (rank + 0.5)) / height}%`;
    return made;
  }).filter((_, rank) => rank % every === 0));
  const frames = heat.frames.map(([rank, since, until]) => {
    const made = make("div", { class: "frame" });
    const [from, to] = [nearest(heat.steps, since), nearest(heat.steps, until) + 1];
    Object.assign(made.style, { left: `${(100 * from) / width}%`, width: `${(100 * (to - from)) / width}%`, top: `${(100 * rank) / height}%`, height: `${100 / height}%` });
    return made;
  });
  byId("heat").querySelector(".cells").replaceChildren(canvas, ...frames);
  const about = `of one rank's own work against the median rank's, from step 1 to ${exact.format(heat.steps.at(-1))}. `
    + (heat.is_uneven ? "A rank that computes more sequences shows as slower. " : "")
    + (heat.frames.length ? "Framed: steps in which a rank was named a straggler." : "No rank was named a straggler.");
  byId("heat").querySelector(".scale").replaceChildren(make("span", {}, "0%"), make("i"), make("span", {}, `${Math.round(100 * top)}% slower`), make("span", { class: "wide" }, about));
  canvas.onpointermove = ({ offsetX, offsetY }) => {
    const [x, y] = [Math.floor((offsetX / canvas.clientWidth) * width), Math.floor((offsetY / canvas.clientHeight) * height)];
    const value = columns[x]?.[y];
    fill(byId("cell"), value === undefined || value === null ? "" : `rank ${heat.labels[y]}, step ${heat.steps[x]}: ${Math.round(100 * value)}% slower`);
  };
}

const EVENT_INKS = { start: "run0", resume: "run0", checkpoint: "other", shares: "optimizer", straggler: "exposed", "straggler over": "exposed", "skipped step": "data",
  "replicas differ": "bad", hang: "bad", failed: "bad", end: "good" };

function showEvents(run) {
  byId("events").hidden = !run.events.length;
  const timed = run.events.filter(([, , , , at]) => at !== null).reverse();
  const [first, last] = [timed[0]?.[4], timed.at(-1)?.[4]];
  const kinds = [...new Set(timed.map(([, kind]) => kind))];
  const lanes = kinds.map((kind) => {
    const marks = timed.filter(([, each]) => each === kind).map(([time, , step, facts, at]) => {
      const mark = make("i", { title: `${time}${step ? ` step ${step}` : ""} ${facts}`, class: kind === "checkpoint" ? "thin" : "" });
      mark.style.left = `${last > first ? (100 * (at - first)) / (last - first) : 0}%`;
      mark.style.color = `var(--${EVENT_INKS[kind] ?? "muted"})`;
      return mark;
    });
    return make("div", {}, make("span", {}, kind), make("div", { class: "lane" }, ...marks));
  });
  const clock = make("div", {}, make("span"), make("div", { class: "clock" }, make("span", {}, timed[0]?.[0] ?? ""), make("span", {}, timed.at(-1)?.[0] ?? "")));
  byId("events").querySelector(".lanes").replaceChildren(...(last > first ? [...lanes, clock] : []));
  const rows = run.events.map((event) => event.slice(0, 4));
  byId("events").querySelector(".scroll").replaceChildren(tableOf({ head: ["time", "event", "step", "what it says"], rows }));
}

function showSettings(run) {
  const rows = Object.entries(run.config).map(([field, value]) => make("div", {}, make("span", {}, field), make("code", {}, value)));
  byId("config").querySelector(".settings").replaceChildren(...rows);
  byId("config").querySelector(".settings").parentElement.hidden = !rows.length;
}

function show() {
  const run = runs[chosen];
  document.querySelector("main").hidden = !run;
  if (!run) return;
  showHead(run);
  showAge();
  showFacts(run);
  showRuns();
  fill(byId("chosen"), runs.length > 1 ? run.name : "");
  fill(document.querySelector("[value=tokens] + span"), run.unit);
  showFindings(run);
  showRanks(run);
  showEvents(run);
  showSettings(run);
  drawCharts();
}

// ---- where runs come from, and what is chosen ----

function receive({ now, path, runs: changes }) {
  ahead = 1000 * now - Date.now();
  for (const [index, fields] of Object.entries(changes)) runs[index] = { ...runs[index], ...fields };
  const name = runs.length === 1 ? runs[0].name : isReport ? `${runs.length} runs compared` : path.split("/").at(-1) || path;
  byId("name").textContent = name;
  if (!isReport) byId("footer").textContent = `${path}, read by paceline watch`;
  fill(byId("trouble"), runs.length ? "" : "There is no run at this path yet; it will appear here.");
  if (Object.keys(changes).length) show();
  document.title = `${runs.length === 1 && !isReport ? `${runs[0].said}, step ${runs[0].step} · ` : ""}${name} · paceline`;
  document.documentElement.dataset.messages = Number(document.documentElement.dataset.messages ?? 0) + 1;
}

function follow() {
  const source = new EventSource("events");
  source.onmessage = (event) => receive(JSON.parse(event.data));
  source.onerror = () => fill(byId("trouble"), source.readyState === EventSource.CLOSED
    ? "`paceline watch` was started again: open the address that it prints now."
    : "No connection to `paceline watch`: it has ended, or the tunnel is closed. This page tries again; training is not affected.");
  setInterval(showAge, 1000);
}

document.addEventListener("change", ({ target }) => {
  if (target.name === "run") {
    chosen = Number(target.value);
    show();
  } else if (target.name === "heat") {
    showHeat(runs[chosen].heat);
  } else {
    if (target.name === "x") zoomTo(null);
    for (const chart of charts) chart.signature = null;
    drawCharts();
  }
});
byId("unzoom").addEventListener("click", () => zoomTo(null));

function redraw() {
  drawCharts();
  if (runs[chosen]?.heat.steps) showHeat(runs[chosen].heat);
}

let width = 0;
new ResizeObserver(() => {
  const now = document.querySelector("main").clientWidth;
  if (now !== width) drawCharts();
  width = now;
}).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
for (const [event, isPrinted] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => { // paper is white, and narrower than a window
    document.documentElement.toggleAttribute("data-print", isPrinted);
    redraw();
  });
}

const inlined = byId("data");
isReport = inlined !== null;
if (isReport) receive(JSON.parse(inlined.textContent));
else follow();
