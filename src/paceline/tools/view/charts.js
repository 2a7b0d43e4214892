"use strict";
// Curves over a run, drawn by uPlot: zoom, cursor, bands, a log axis, smoothing. page.js says which runs there are.
const byId = (id) => document.getElementById(id);
const all = (selector) => [...document.querySelectorAll(selector)];
const runs = [];
let chosen = 0;
let ahead = 0; // milliseconds by which the server's clock is ahead of this one
let zoom = null; // [from, to] on the x axis; null: the whole run
let isReport = false;

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const runInk = (index) => `run${index % 8}`;
const dashOf = (index) => (index + Math.floor(index / 8)) % 4; // with the colour unique for 32 runs
const DASHES = [[], [10, 4], [5, 4], [2, 3]];
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const tick = (value) => (value && Math.abs(value) < 1e-3 ? value.toExponential() : compact.format(value).replace("K", "k"));
const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
const xAxis = () => document.querySelector("input[name=x]:checked").value;
const isOn = (name) => document.querySelector(`input[name=${name}]`).checked;

function duration(seconds) {
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  return h ? `${h}h${String(m).padStart(2, "0")}m` : m ? `${m}m${String(s).padStart(2, "0")}s` : `${s}s`;
}

function nearest(xs, at) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < at) low = middle + 1; else high = middle;
  }
  return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
}

const PARTS = ["compute", "data", "forward", "backward", "exposed communication", "optimizer", "other"];
const partInk = (part) => part.split(" ")[0];
const CHARTS = [
  { id: "loss", columns: { loss: "training" }, height: 470, isLoss: true },
  { id: "rate", columns: { tokens_per_s: "throughput, a second" }, height: 190, isFromZero: true },
  { id: "lr", columns: { lr: "learning rate" }, height: 150, isFromZero: true },
  { id: "norm", columns: { grad_norm: "gradient norm" }, height: 190, isLog: true, sharesBox: true },
  { id: "parts", table: "parts", columns: Object.fromEntries(PARTS.map((part) => [part, part])), height: 240, isFromZero: true, isStacked: true, unit: " ms" },
  { id: "shares", table: "shares", columns: null, height: 180, isFromZero: true, isStepped: true },
  { id: "traffic", table: "steps", columns: { comm_ms: "collectives under way", exposed_comm_ms: "exposed" }, height: 190, isFromZero: true, unit: " ms" },
];

// The mean of as many points before as after: a curve that falls is not late.
function smoothed(values) {
  const most = Math.max(2, Math.round(values.length / 60));
  return values.map((value, at) => {
    const reach = Math.min(most, at, values.length - 1 - at);
    const around = values.slice(at - reach, at + reach + 1).filter((each) => each !== null);
    return value === null ? null : around.reduce((sum, each) => sum + each, 0) / around.length;
  });
}

class Chart {
  constructor(description) {
    Object.assign(this, description);
    this.place = byId(this.id);
    this.box = this.place.closest("#logged > div, section"); // hidden without a line
    this.legend = make("p", { class: "legend" });
    this.place.before(this.legend);
    this.hidden = new Set();
    this.place.tabIndex = 0;
    this.place.setAttribute("role", "img");
    this.place.addEventListener("keydown", (event) => this.press(event));
    this.place.addEventListener("blur", () => this.point(null));
  }

  // A line: where it is, and how it looks. Of several runs each has one; the charts with a table show the chosen run.
  found() {
    if (this.table) {
      const table = runs[chosen]?.curves[this.table] ?? {};
      const columns = this.columns ?? Object.fromEntries(Object.keys(table).filter((name) => name.startsWith("rank")).map((name) => [name, name]));
      return Object.entries(columns).filter(([column]) => table[column]).map(([column, name], index) =>
        ({ name, ink: this.isStacked ? partInk(column) : this.columns ? ["run0", "exposed"][index] : runInk(index), dash: this.columns ? 0 : dashOf(index), table, ...table[column] }));
    }
    const [[column, name]] = Object.entries(this.columns);
    const lines = [];
    for (const [index, run] of runs.entries()) {
      const [table, validation] = [run?.curves.steps ?? {}, run?.curves.validation ?? {}];
      const isOne = runs.length === 1;
      const common = { ink: runInk(index), dash: dashOf(index), width: isOne ? 1.75 : 1.75 + Math.min(1.5, 4 / runs.length) * (runs.length - 1 - index) };
      if (table[column]) lines.push({ ...common, name: isOne ? name : run.name, table, ...table[column] });
      if (validation.step?.length && validation[column]) {
        lines.push({ ...common, name: isOne ? "validation" : `${run.name}, validation`, table: validation, ...validation[column], isDotted: true, ink: isOne ? "run1" : common.ink, width: 1 });
      }
    }
    return lines;
  }

  lines() {
    return this.found().map(({ table, mean, low, high, ...line }) => {
      const xs = table[xAxis()] ?? [];
      const keep = xs.map((x, index) => index).filter((index) => xs[index] !== null && !(index && xs[index] === xs[index - 1]));
      const chosenOnes = (values) => values && keep.map((index) => values[index]);
      const isBand = low && runs.length < 4;
      const made = { ...line, xs: chosenOnes(xs), values: chosenOnes(mean), low: isBand && chosenOnes(low), high: isBand && chosenOnes(high) };
      const isSmooth = this.isLoss && isOn("smooth") && !line.isDotted && made.values.length > 8;
      return { ...made, drawn: isSmooth ? smoothed(made.values) : made.values, isRaw: isSmooth && !isBand };
    });
  }

  isLogarithmic() {
    return this.isLog || (this.isLoss && isOn("log"));
  }

  // The range of the y axis for what of the x axis is shown.
  span(from, to) {
    const isClose = this.isLoss && isOn("close");
    const values = [];
    for (const [line, { xs, drawn, values: mean, low, high, isRaw }] of this.shown.entries()) {
      const inside = xs.map((x, index) => index).filter((index) => xs[index] >= from && xs[index] <= to);
      if (this.isStacked) {
        if (!line) values.push(...inside.map((index) => this.stacked(index, this.shown.length)));
        continue;
      }
      const later = isClose ? inside.slice(Math.floor(inside.length / 5)) : inside;
      for (const index of later) values.push(...(isClose || !low ? [drawn[index], isRaw && !isClose ? mean[index] : null] : [low[index], high[index]]));
    }
    const isLog = this.isLogarithmic();
    const known = values.filter((value) => value !== null && value !== undefined && (!isLog || value > 0)).sort((a, b) => a - b);
    if (!known.length) return isLog ? [0.1, 1] : [0, 1];
    const cut = isClose ? Math.floor(known.length / 100) : 0;
    const [low, high] = [this.isFromZero ? 0 : known[cut], known[known.length - 1 - cut]];
    if (isLog) return [low / 1.06, high * 1.06];
    const room = 0.05 * (high - low) || Math.abs(high) / 10 || 0.5;
    return [this.isFromZero ? 0 : low - room, high + room];
  }

  // The sum of the first so many parts at a point.
  stacked(at, count) {
    return this.shown.slice(0, count).reduce((sum, { values }) => sum + (values[at] ?? 0), 0);
  }

  draw() {
    this.every = this.lines();
    const boxes = this.sharesBox ? [this.place, this.place.previousElementSibling] : this.isLoss ? [] : [this.box];
    for (const each of boxes) each.hidden = !this.every.length;
    this.shown = this.every.filter(({ name }) => !this.hidden.has(name));
    if (!this.every.length || !this.place.clientWidth) return;
    this.place.setAttribute("aria-label", `${this.box.querySelector("h2, h3").textContent}. Arrow keys move along the curve, + and - zoom.`);
    const { tables, series, bands } = this.series();
    const data = tables.length ? uPlot.join(tables) : [[0]];
    const signature = JSON.stringify([series.map(({ key, points }) => [key, points?.show]), this.isLogarithmic()]);
    if (signature !== this.signature) {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(series, bands), data, this.place);
      this.signature = signature;
    } else {
      this.plot.setSize(this.size());
      this.plot.setData(data);
    }
    this.label(null);
  }

  size() {
    const width = this.place.clientWidth;
    return { width, height: width < 500 ? Math.min(this.height, 250) : this.height };
  }

  series() {
    const [tables, series, bands] = [[], [{ key: "x" }], []];
    const add = (line, values, more) => {
      const ink = () => colourOf(line.ink);
      series.push({ key: `${line.name} ${Object.keys(more)}`, stroke: ink, width: line.width ?? 1.5, dash: DASHES[line.dash ?? 0], spanGaps: true, points: { show: values.length < 3 }, ...more });
      return values;
    };
    if (this.isStacked) { // the uppermost first: the ones below are painted over it
      for (const [index, line] of [...this.shown.entries()].reverse()) {
        const sums = line.xs.map((_, at) => this.stacked(at, index + 1));
        tables.push([line.xs, add(line, sums, { fill: () => colourOf(line.ink), width: 0.5 })]);
      }
      return { tables, series, bands };
    }
    for (const line of this.shown) {
      const table = [line.xs];
      if (line.low) {
        const fill = () => `${colourOf(line.ink)}2e`;
        bands.push({ series: [series.length, series.length + 1], fill });
        for (const edge of [line.high, line.low]) table.push(add(line, edge, { width: 0.5, stroke: () => `${colourOf(line.ink)}70`, dash: [], points: { show: false } }));
      }
      if (line.isRaw) table.push(add(line, line.values, { width: 1, stroke: () => `${colourOf(line.ink)}50`, dash: [], points: { show: false } }));
      const dots = { size: runs.length > 1 ? 5 : 7, fill: () => colourOf(line.ink), show: true };
      const path = this.isStepped ? { paths: uPlot.paths.stepped({ align: 1 }) } : {};
      table.push(add(line, line.drawn, line.isDotted ? { dash: [2, 3], points: line.xs.length < 60 ? dots : { show: false } } : path));
      tables.push(table);
    }
    return { tables, series, bands };
  }

  options(series, bands) {
    const isLog = this.isLogarithmic();
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: () => colourOf("muted"), font, grid: { stroke: () => colourOf("line"), width: 1 }, ticks: { show: false } };
    const marks = (plot, _, low, high) => logMarks(low, high);
    return {
      ...this.size(),
      padding: [10, 14, 0, 0],
      legend: { show: false },
      series,
      bands,
      scales: {
        x: { time: false, range: (_, low, high) => zoom ?? (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: isLog ? 3 : 1, range: (plot) => this.span(plot.scales.x.min ?? -Infinity, plot.scales.x.max ?? Infinity) },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 30, space: 64, incrs: WHOLE_STEPS, values: (_, at) => at.map(xAxis() === "seconds" ? duration : tick), splits: xAxis() === "seconds" ? (_, __, low, high) => clockMarks(low, high, this.place.clientWidth / 90) : undefined },
        { ...axis, size: 54, space: 34, values: (_, at) => at.map(tick), ...(isLog ? { splits: marks, filter: (_, at) => at } : {}) },
      ],
      cursor: {
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false, setScale: false },
        sync: { key: "x", setSeries: false },
        bind: { dblclick: () => () => zoomTo(null) },
      },
      hooks: {
        setCursor: [(plot) => this.label(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width < 4) return;
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
        }],
        draw: [(plot) => this.restarts(plot)],
      },
    };
  }

  restarts(plot) { // where the only run continued after a stop
    if (runs.length > 1 || !this.isLoss) return;
    const { ctx, bbox } = plot;
    const { step, [xAxis()]: xs } = runs[0].curves.steps;
    ctx.save();
    ctx.strokeStyle = colourOf("muted");
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const at of runs[0].resumed.filter((each) => each !== null)) {
      const x = plot.valToPos(xs[nearest(step, at)], "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // The legend: a button for each line, which hides it, with its value under the cursor.
  label(at) {
    const isKept = this.legend.dataset.lines === this.every.map(({ name }) => name).join("\n");
    if (!isKept) {
      this.legend.dataset.lines = this.every.map(({ name }) => name).join("\n");
      this.legend.replaceChildren(...this.every.map((line) => this.button(line)), make("span", { class: "where", "aria-live": "polite" }));
    }
    const unit = this.unit ?? "";
    for (const [index, { name, xs, values, low, high }] of this.every.entries()) {
      const nearby = at === null || !xs.length || at > xs.at(-1) + (xs.at(-1) - xs[0]) / 50 ? null : nearest(xs, at);
      const value = nearby === null ? null : values[nearby];
      const span = value !== null && low ? ` (${exact.format(low[nearby])} to ${exact.format(high[nearby])})` : "";
      this.legend.children[index].lastChild.textContent = value === null || value === undefined ? name : `${name} ${exact.format(value)}${unit}${span}`;
    }
    this.legend.lastChild.textContent = at === null ? "" : xAxis() === "seconds" ? `after ${duration(at)}` : `${xAxis()} ${exact.format(Math.round(at))}`;
  }

  button({ name, ink, dash, isDotted }) {
    const swatch = make("span", { class: `swatch ${this.isStacked ? "area" : isDotted ? "dots" : `dash${dash}`}` });
    swatch.style.color = `var(--${ink})`;
    const button = make("button", { type: "button", "aria-pressed": !this.hidden.has(name) }, swatch, make("span", {}, name));
    button.addEventListener("click", () => {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      button.setAttribute("aria-pressed", !this.hidden.has(name));
      this.draw();
    });
    return button;
  }

  press(event) {
    if (!this.plot || event.ctrlKey || event.metaKey) return;
    const xs = this.plot.data[0];
    const { min, max } = this.plot.scales.x;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (event.key === "Escape") {
      this.point(null);
      zoomTo(null);
    } else if (factor) {
      const middle = this.at ?? (min + max) / 2;
      zoomTo([Math.max(xs[0], middle - (middle - min) * factor), Math.min(xs.at(-1), middle + (max - middle) * factor)]);
    } else if (event.key in moves) {
      const now = this.at === undefined || this.at === null ? xs.length : nearest(xs, this.at);
      this.point(xs[Math.max(0, Math.min(xs.length - 1, now + moves[event.key]))]);
    } else return;
    event.preventDefault();
  }

  point(at) {
    this.at = at;
    this.plot?.setCursor({ left: at === null ? -10 : this.plot.valToPos(at, "x"), top: 10 });
    this.label(at);
  }
}

// 1, 2, 5, 10, ...: there is no half step.
const WHOLE_STEPS = Array.from({ length: 48 }, (_, index) => Number(`${[1, 2, 5][index % 3]}e${Math.floor(index / 3)}`));

function logMarks(low, high) {
  const found = [];
  const factors = high / low > 1000 ? [1] : high / low > 4 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade++) {
    for (const factor of factors) found.push(Number(`${factor}e${decade}`));
  }
  return found.filter((at) => at >= low && at <= high);
}

function clockMarks(low, high, most) {
  const steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];
  const step = steps.find((each) => (high - low) / each <= most) ?? 86400 * Math.ceil((high - low) / 86400 / most);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}

function zoomTo(span) {
  zoom = span && span[1] > span[0] ? span : null;
  byId("unzoom").hidden = !zoom;
  drawCharts();
}

const charts = CHARTS.map((description) => new Chart(description));

// A chart for each number that a script logs, which may be new.
function addLogged() {
  const isLogged = (column) => column.startsWith("logged ");
  const columns = runs.flatMap((run) => [run.curves.steps, run.curves.validation].flatMap((table) => Object.keys(table ?? {}))).filter(isLogged);
  for (const column of new Set(columns)) {
    if (charts.some(({ columns: own }) => own?.[column])) continue;
    const [name, id] = [column.slice("logged ".length), `logged-${charts.length}`];
    byId("logged").hidden = false;
    byId("logged").append(make("div", {}, make("h3", {}, name), make("div", { class: "chart", id })));
    charts.push(new Chart({ id, columns: { [column]: "training" }, height: 160 }));
  }
}

function drawCharts() {
  addLogged();
  for (const chart of charts) chart.draw();
  document.documentElement.dataset.drawn = Number(document.documentElement.dataset.drawn ?? 0) + 1;
}
