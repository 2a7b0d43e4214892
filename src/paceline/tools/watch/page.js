"use strict";
// Shows what the server sends: {now, path, runs: {index: {field: value that changed}}}. All texts of a run folder are
// set as text, never as markup. Notes on <html>: data-messages, how many have arrived.
const PARTS = ["data", "forward", "backward", "optimizer", "exposed communication", "other"];
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const runs = []; // views, as tools/watch/view.py has them
let chosen = 0;
let ahead = 0; // milliseconds by which the server's clock is ahead of this one

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "line", "path", "text", "circle"].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const ink = (index) => `var(--run${index % 8})`;
const dash = (index) => (index + Math.floor(index / 8)) % 4; // with the colour unique for 32 runs
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const tick = (value) => short.format(value).replace("K", "k");
const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });

function duration(seconds) {
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  return h ? `${h}h${String(m).padStart(2, "0")}m` : m ? `${m}m${String(s).padStart(2, "0")}s` : `${s}s`;
}

// ---- curves ----

function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(at);
  return found;
}

class Chart {
  constructor(id, name, others, fromZero) {
    this.place = byId(id);
    this.readout = this.place.nextElementSibling;
    Object.assign(this, { name, others, fromZero, at: null });
    this.place.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.place.addEventListener("pointerdown", (event) => this.point(event.offsetX));
    this.place.addEventListener("pointerleave", () => this.leave());
    this.place.addEventListener("blur", () => this.leave());
    this.place.addEventListener("keydown", (event) => this.press(event));
  }

  curves() {
    const x = document.querySelector("input[name=x]:checked").value;
    const found = [];
    for (const [index, run] of runs.entries()) {
      for (const name of [this.name, ...this.others]) {
        const { [x]: xs, mean, low, high } = run?.curves[name] ?? {};
        if (xs?.length) found.push({ index, name, xs, mean, low, high, isBand: low.length > 0 && runs.length < 4 });
      }
    }
    return found;
  }

  span(curves, isClose) {
    const all = [];
    for (const { name, mean, low, high, isBand } of curves) {
      const from = isClose ? Math.floor(mean.length / 5) : 0;
      if (isClose || !isBand) all.push(...mean.slice(from));
      else all.push(...low, ...high);
    }
    all.sort((a, b) => a - b);
    const cut = isClose ? Math.floor(all.length / 100) : 0;
    const [low, high] = [this.fromZero ? 0 : all[cut], all[all.length - 1 - cut]];
    const room = 0.04 * (high - low) || 0.5;
    return [this.fromZero ? 0 : low - room, high + room];
  }

  draw() {
    const curves = this.curves();
    const [width, height] = [this.place.clientWidth, this.place.clientHeight];
    if (!curves.length || !width) return this.place.replaceChildren();
    const isClose = !this.fromZero && document.querySelector("input[name=range]:checked").value === "close";
    const isTime = document.querySelector("input[name=x]:checked").value === "seconds";
    const [low, high] = this.span(curves, isClose);
    const xs = curves.flatMap((curve) => [curve.xs[0], curve.xs.at(-1)]);
    const [first, last] = [Math.min(...xs), Math.max(...xs)];
    const [left, right, top, bottom] = [48, width - 8, 8, height - 24];
    this.x = (value) => left + ((value - first) / (last - first || 1)) * (right - left);
    this.y = (value) => bottom - ((Math.min(high, Math.max(low, value)) - low) / (high - low)) * (bottom - top);
    const svg = make("svg", { "aria-hidden": "true" });
    for (const at of ticks(low, high, height / 40)) {
      svg.append(make("line", { class: "grid", x1: left, x2: right, y1: this.y(at), y2: this.y(at) }));
      svg.append(make("text", { x: left - 8, y: this.y(at) + 4, "text-anchor": "end" }, tick(at)));
    }
    for (const at of ticks(first, last, width / 90)) {
      const label = isTime ? duration(at) : tick(at);
      const anchor = this.x(at) > right - 20 ? "end" : "middle";
      svg.append(make("text", { x: this.x(at), y: height - 6, "text-anchor": anchor }, label));
    }
    this.marks(svg, top, bottom);
    for (const curve of curves) this.line(svg, curve);
    this.cursor = make("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    svg.append(this.cursor);
    this.place.replaceChildren(svg);
    this.drawn = curves;
    if (this.at !== null) this.show();
  }

  marks(svg, top, bottom) { // where the only run continued after a stop
    if (runs.length > 1 || document.querySelector("input[name=x]:checked").value !== "step") return;
    for (const step of runs[0].resumed.filter((step) => step !== null)) {
      svg.append(make("line", { class: "mark", x1: this.x(step), x2: this.x(step), y1: top, y2: bottom }));
    }
  }

  line(svg, { index, name, xs, mean, low, high, isBand }) {
    const at = (values) => values.map((value, i) => `${this.x(xs[i]).toFixed(1)},${this.y(value).toFixed(1)}`);
    const isOther = name !== this.name;
    const colour = isOther && runs.length === 1 ? "var(--run1)" : ink(index);
    const group = [];
    if (isBand && !isOther) {
      group.push(make("path", { class: "band", d: `M${at(high).join("L")}L${at(low).reverse().join("L")}Z` }));
      group[0].style.fill = colour;
    }
    group.push(make("path", { class: isOther ? "validation" : `dash${dash(index)}`, d: `M${at(mean).join("L")}` }));
    group.at(-1).style.stroke = colour;
    if (!isOther && runs.length > 1) { // later lines are thinner, so that equal curves all show
      group.at(-1).style.strokeWidth = 1.75 + Math.min(1.5, 4 / runs.length) * (runs.length - 1 - index);
    }
    if (isOther && xs.length < 60) {
      for (const point of at(mean)) {
        const [cx, cy] = point.split(",");
        group.push(make("circle", { cx, cy, r: 3 }));
        group.at(-1).style.fill = colour;
      }
    }
    svg.append(...group);
  }

  // The cursor is at a value of the x axis, so that it stays where it is while the curve grows.
  point(pixel) {
    if (!this.drawn?.length) return;
    const xs = this.longest().xs;
    this.at = xs.reduce((best, x) => (Math.abs(this.x(x) - pixel) < Math.abs(this.x(best) - pixel) ? x : best));
    this.show();
  }

  press(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") return this.leave();
    if (!(event.key in moves) || !this.drawn?.length) return;
    event.preventDefault();
    const xs = this.longest().xs;
    const now = this.at === null ? xs.length : nearest(xs, this.at);
    this.at = xs[Math.max(0, Math.min(xs.length - 1, now + moves[event.key]))];
    this.show();
  }

  longest() {
    return this.drawn.reduce((best, curve) => (curve.xs.at(-1) > best.xs.at(-1) ? curve : best));
  }

  show() {
    const place = this.x(this.at);
    for (const name of ["x1", "x2"]) this.cursor.setAttribute(name, place);
    this.cursor.setAttribute("visibility", "visible");
    const x = document.querySelector("input[name=x]:checked").value;
    const reached = this.drawn.filter(({ xs }) => xs.at(-1) >= this.at || xs === this.longest().xs);
    const said = reached.map(({ index, name, xs, mean, low, high }) => {
      const i = nearest(xs, this.at);
      const span = low.length && name === this.name ? ` (${exact.format(low[i])} to ${exact.format(high[i])})` : "";
      const who = runs.length > 1 ? `${runs[index].name} ` : "";
      return `${who}${name === "rate" ? "" : `${name} `}${exact.format(mean[i])}${span}`;
    });
    const where = x === "seconds" ? `after ${duration(this.at)}` : `${x} ${tick(this.at)}`;
    this.readout.textContent = `${where}: ${said.join(" · ")}`;
  }

  leave() {
    this.at = null;
    this.cursor?.setAttribute("visibility", "hidden");
    this.readout.textContent = "";
  }
}

function nearest(xs, at) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - at) < Math.abs(xs[best] - at)) best = i;
  return best;
}

const charts = [new Chart("loss", "loss", ["validation"], false), new Chart("rate", "rate", [], true)];

// ---- the rest of the page ----

function showRuns() {
  const factOf = (run, label) => run.facts.find(([name]) => name === label)?.[1] ?? "-";
  const rows = runs.map((run, index) => {
    const sample = make("svg", { "aria-hidden": "true" }, make("line", { class: `dash${dash(index)}`, x2: 30, y1: 4, y2: 4 }));
    sample.firstChild.style.stroke = ink(index);
    const input = make("input", { type: "radio", name: "run", value: index });
    input.checked = index === chosen;
    const facts = ["Loss", "Validation loss", "Throughput", "Time left"].map((label) => factOf(run, label));
    const name = make("th", { scope: "row" }, make("label", {}, input, sample, run.name));
    const state = make("td", { class: run.level, title: run.said }, run.said);
    return make("tr", {}, name, state, ...[run.step, ...facts].map((cell) => make("td", {}, cell)));
  });
  const table = byId("runs").querySelector("tbody");
  const isFocused = table.contains(document.activeElement);
  table.replaceChildren(...rows);
  if (isFocused) table.querySelector("input:checked").focus();
}

function showState(run) {
  const place = byId("state");
  place.querySelector("h2").textContent = run.name;
  const status = place.querySelector(".status");
  status.textContent = run.said;
  status.className = `status ${run.level}`;
  const isKnown = run.frac !== null; // else the run has no horizon
  place.querySelector("progress").hidden = !isKnown;
  place.querySelector("progress").value = run.frac ?? 0;
  place.querySelector(".progress span").textContent = `step ${run.step}${isKnown ? `, ${Math.floor(100 * run.frac)}%` : ""}`;
  const facts = run.facts.map(([label, value, note]) =>
    make("div", {}, make("dt", {}, label), make("dd", { class: "value" }, value), make("dd", { class: "note" }, note)));
  place.querySelector("dl").replaceChildren(...facts);
  showAge();
}

function showAge() {
  const run = runs[chosen];
  if (!run?.updated_s) return;
  const age = Math.max(0, (Date.now() + ahead) / 1000 - run.updated_s);
  byId("age").textContent = `newest record ${duration(age)} ago`;
}

const MOST_RANKS = 16, FEW_RANKS = 8; // more ranks than the first are shown as the slowest few, and a line for the others

function showRanks(run) {
  const place = byId("ranks");
  place.hidden = !run.ranks.length;
  place.querySelector(".finding").textContent = run.ranks_said;
  const total = (rank) => PARTS.reduce((sum, part) => sum + Math.max(0, rank.parts[part]), 0);
  const longest = Math.max(...run.ranks.map(total));
  const isMany = run.ranks.length > MOST_RANKS;
  const shown = run.ranks.filter((rank, place) => !isMany || place < FEW_RANKS || rank.is_slow);
  const others = run.ranks.filter((rank) => !shown.includes(rank));
  const milliseconds = (rank) => `${exact.format(Number(rank.work_ms.toPrecision(3)))} ms`;
  const rows = shown.map((rank) => {
    const parts = PARTS.map((part) => {
      const made = make("span", { title: `${part}: ${exact.format(rank.parts[part])} ms` });
      made.style.width = `${(100 * Math.max(0, rank.parts[part])) / longest}%`;
      made.style.background = `var(--${part.split(" ")[0]})`;
      return made;
    });
    const label = `${rank.rank}${rank.host ? ` · ${rank.host}` : ""}`;
    const name = make("span", { title: label }, label, make("span", { class: "wide" }, rank.is_slow ? " slow" : ""));
    const work = make("span", {}, make("span", { class: "wide" }, "works "), milliseconds(rank));
    const row = make("li", {}, name, make("div", { class: "bar" }, ...parts), work);
    row.classList.toggle("slow", rank.is_slow);
    return row;
  });
  place.querySelector(".bars").replaceChildren(...rows);
  place.querySelector(".others").textContent = others.length
    ? `and ${others.length} more ranks, which work ${milliseconds(others.at(-1))} to ${milliseconds(others[0])} a step` : "";
}

function showEvents(run) {
  byId("events").hidden = !run.events.length;
  const rows = run.events.map(([time, kind, step, facts]) =>
    make("tr", {}, make("th", { scope: "row" }, time), ...[kind, step, facts].map((cell) => make("td", {}, cell))));
  byId("events").querySelector("tbody").replaceChildren(...rows);
}

function show() {
  const run = runs[chosen];
  const isMany = runs.length > 1;
  byId("runs").hidden = !isMany;
  byId("state").querySelector("h2").hidden = !isMany;
  if (isMany) showRuns();
  byId("state").hidden = !run;
  byId("curves").hidden = !runs.some((each) => each.curves.loss?.mean.length);
  if (!run) return;
  // Of several runs the curves are common, and the rest is of the chosen one.
  if (isMany === (byId("state").nextElementSibling === byId("curves"))) {
    byId("curves")[isMany ? "after" : "before"](byId("state"));
  }
  showState(run);
  showRanks(run);
  showEvents(run);
  for (const chart of charts) chart.draw();
  document.title = `${isMany ? "" : `${run.said}, step ${run.step} · `}${byId("name").textContent}`;
}

function trouble(sentence) {
  byId("trouble").textContent = sentence;
  byId("trouble").hidden = !sentence;
}

function receive(event) {
  const message = JSON.parse(event.data);
  ahead = 1000 * message.now - Date.now();
  for (const [index, fields] of Object.entries(message.runs)) runs[index] = { ...runs[index], ...fields };
  byId("name").textContent = message.path.split("/").at(-1) || message.path;
  byId("path").textContent = message.path;
  trouble(runs.length ? "" : "There is no run at this path yet; it will appear here.");
  if (Object.keys(message.runs).length) show();
  document.documentElement.dataset.messages = Number(document.documentElement.dataset.messages ?? 0) + 1;
}

byId("ranks").querySelector(".legend").append(...PARTS.map((part) => {
  const swatch = make("span", { class: "swatch" });
  swatch.style.color = `var(--${part.split(" ")[0]})`;
  return make("span", {}, swatch, part);
}));

const source = new EventSource("events");
source.onmessage = receive;
source.onerror = () => trouble(source.readyState === EventSource.CLOSED
  ? "`paceline watch` was started again: open the address that it prints now."
  : "No connection to `paceline watch`: it has ended, or the tunnel is closed. This page tries again; training is not affected.");

document.addEventListener("change", ({ target }) => {
  if (target.name === "run") chosen = Number(target.value);
  if (target.name === "x") for (const chart of charts) chart.leave();
  show();
});
addEventListener("resize", () => charts.forEach((chart) => chart.draw()));
setInterval(showAge, 1000);
