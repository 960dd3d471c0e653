// Line charts and stacked areas in SVG. All charts share one cursor: hovering over one shows the same step in all.
const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 46, right: 10, top: 8, bottom: 20 }; // left: at least; labels of an axis may need more

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function draw(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value; // NaN and infinities are stored as text
  if (Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (Number.isInteger(value)) return String(value);
  return value.toPrecision(size >= 100 ? 4 : 3);
}

function ticks(low, high, count) {
  const step0 = (high - low) / count;
  const power = Math.pow(10, Math.floor(Math.log10(step0)));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= step0 * 0.999);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step / 1e6 ? 0 : v);
  return found;
}

// The text of an axis mark, with as many digits as tell it from the next one, which is `step` away.
function tickText(value, step) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  const digits = Math.min(Math.max(Math.ceil(Math.log10(size / step) + 1e-9), 0) + 2, 15);
  const trim = (one) => String(Number(one.toPrecision(digits)));
  if (size >= 1e9) return trim(value / 1e9) + "G";
  if (size >= 1e6) return trim(value / 1e6) + "M";
  if (size >= 1e4) return trim(value / 1e3) + "k";
  if (size < 1e-3) return Number(value.toPrecision(digits)).toExponential().replace("e-", "e−");
  return trim(value);
}

// Exponential moving average with bias correction at the start; gaps stay gaps.
function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    mean = mean * weight + (1 - weight) * value;
    mass = mass * weight + (1 - weight);
    return mean / mass;
  });
}

// Index of the last step <= `step`; -1 if there is none.
function indexAt(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// The curves of a chart: of each shown run, each of its metrics. One run: a colour for each metric; several: for each run.
function curvesOf(spec) {
  const stack = spec.kind === "stack";
  const runs = stack ? [page.run].filter((run) => run.phases) : page.runs.filter((run) => run.shown);
  return runs.flatMap((run) => spec.series.flatMap(([name, label], i) => {
    const curve = stack ? run.phases.bands[name] && { steps: run.phases.steps, values: run.phases.bands[name] } : run.series[name];
    if (!curve) return [];
    const many = page.runs.length > 1 && !stack;
    const dash = many ? DASHES[(run.dash + i) % DASHES.length] : "";
    const text = many ? [run.name, label].filter(Boolean).join(" · ") : label;
    return [{ name, run, label: text, about: spec.about[i], colour: `var(--c${(many ? run.index : i) % 8})`, dash, steps: curve.steps, values: curve.values }];
  }));
}

const DASHES = ["", "5 3", "2 3", "8 3 2 3"];
const LEGEND = 6; // a chart with more curves has no legend: the table of runs has their colours

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.stack = spec.kind === "stack";
    this.log = false;
    this.host = make("article", { class: this.stack ? "chart wide" : "chart" });
    this.build();
    this.refresh();
  }

  get points() { return this.series.reduce((sum, s) => sum + s.values.length, 0); }

  build() {
    const head = make("div", { class: "chart-head" });
    const title = make("h3", { title: this.spec.about.join("\n") }, this.spec.title);
    this.read = make("span", { class: "read" });
    head.append(title);
    if (this.spec.unit) head.append(make("span", { class: "unit" }, this.spec.unit));
    this.logButton = make("button", { class: "log", type: "button", "aria-pressed": "false", title: "a logarithmic axis" }, "log");
    this.logButton.hidden = true;
    this.logButton.addEventListener("click", () => {
      this.log = !this.log;
      this.logButton.setAttribute("aria-pressed", String(this.log));
      this.draw();
    });
    head.append(this.logButton, this.read);
    this.legend = make("div", { class: "legend" });
    this.svg = document.createElementNS(SVG, "svg");
    this.host.append(head, this.legend, this.svg);
    this.svg.addEventListener("pointermove", (event) => {
      const [first, last] = page.span(), box = this.svg.getBoundingClientRect();
      const share = (event.clientX - box.left - this.left) / (box.width - this.left - MARGIN.right);
      page.point(Math.round(first + Math.min(Math.max(share, 0), 1) * (last - first)), this);
    });
    this.svg.addEventListener("pointerleave", () => { page.point(null, null); hideTip(); });
  }

  // Take the newest curves and draw them.
  refresh() {
    this.series = curvesOf(this.spec);
    if (this.stack && this.series.length) // the last band is the part of the step that no phase timed
      this.series.push({ name: "", label: "rest of the step", about: "the part of a step that no phase timed", colour: "var(--faint)", steps: page.run.phases.steps, values: page.run.phases.rest });
    const finite = this.series.flatMap((s) => s.values).filter((v) => Number.isFinite(v));
    const [least, most] = ends(finite);
    this.logButton.hidden = this.stack || !(least > 0 && most / least > 100);
    if (this.logButton.hidden) this.log = false;
    const legend = this.series.length > 1 && this.series.length <= LEGEND || this.stack;
    this.legend.replaceChildren(...(legend ? this.series : []).map((s) => {
      s.read = make("b");
      const swatch = make("i");
      swatch.style.background = s.colour;
      return make("span", { title: s.about }, swatch, s.label + " ", s.read);
    }));
    this.host.hidden = !this.series.length;
    this.width = 0;
    this.draw();
    this.point(null);
  }

  draw() {
    const width = Math.round(this.host.clientWidth) - 24;
    if (width < 60 || !this.series.length) return; // inside a closed section
    this.width = width;
    this.height = 170;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.scale();
    this.axes();
    if (this.stack) this.bands(); else this.series.forEach((s) => this.line(s));
    this.findings();
    this.cursor = draw(this.svg, "line", { class: "cursor", y1: MARGIN.top, y2: this.height - MARGIN.bottom, visibility: "hidden" });
  }

  scale() {
    const inner = this.height - MARGIN.top - MARGIN.bottom;
    const values = this.stack
      ? this.series[0].steps.map((_, i) => this.series.reduce((sum, s) => sum + s.values[i], 0)).concat(0)
      : this.series.flatMap((s) => s.values).filter((v) => Number.isFinite(v));
    let [low, high] = ends(values);
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    this.flat = !this.stack && high - low <= 1e-12 * Math.max(Math.abs(high), Math.abs(low)) ? low : null;
    if (this.log) [low, high] = [Math.log10(low), Math.log10(high)];
    if (this.flat !== null) { const half = Math.abs(high) || 1; low -= half; high += half; } // one mark: its value
    else if (!this.stack) { // an axis ends at 0 or 1 where a curve is near it, and never shows a sign that no value has
      const pad = (high - low) * 0.06;
      const positive = !this.log && low >= 0, negative = !this.log && high <= 0, share = !this.log && high <= 1;
      const span = high - low;
      low = positive && low < span * 0.4 ? 0 : positive ? Math.max(low - pad, 0) : low - pad;
      high = share && high > 0.9 ? 1 : negative ? Math.min(high + pad, 0) : high + pad;
    } else high *= 1.04;
    this.low = low; this.high = high;
    const [first, last] = page.span();
    this.marks = this.marksOf();
    this.left = Math.max(MARGIN.left, 12 + 6.4 * Math.max(...this.marks.map(([, text]) => text.length)));
    const across = this.width - this.left - MARGIN.right;
    this.x = (step) => this.left + (last > first ? (step - first) / (last - first) : 0.5) * across;
    this.y = (value) => MARGIN.top + inner - (((this.log ? Math.log10(value) : value) - low) / (high - low)) * inner;
  }

  // The marks of the vertical axis: value and text.
  marksOf() {
    const decades = Math.floor(this.high) - Math.ceil(this.low) + 1;
    const marks = this.flat !== null ? [this.flat] : this.log && decades >= 2
      ? Array.from({ length: decades }, (_, i) => Math.pow(10, Math.ceil(this.low) + i))
      : ticks(this.low, this.high, 5).map((v) => (this.log ? Math.pow(10, v) : v));
    const apart = marks.length > 1 ? marks[1] - marks[0] : Math.abs(marks[0]) || 1;
    return marks.map((value) => [value, tickText(value, apart)]);
  }

  axes() {
    for (const [value, text] of this.marks) {
      const y = this.y(value);
      draw(this.svg, "line", { class: "gridline", x1: this.left, x2: this.width - MARGIN.right, y1: y, y2: y });
      draw(this.svg, "text", { x: this.left - 6, y: y + 3.5, "text-anchor": "end" }, text);
    }
    const [first, last] = page.span();
    const steps = last > first ? ticks(first, last, Math.max(2, Math.floor(this.width / 110))).filter(Number.isInteger) : [first];
    for (const step of steps) {
      const x = this.x(step), anchor = x > this.width - 24 ? "end" : "middle";
      draw(this.svg, "text", { x: anchor === "end" ? this.width - 2 : x, y: this.height - 5, "text-anchor": anchor }, step.toLocaleString("en"));
    }
  }

  path(steps, values) {
    let path = "", open = false;
    values.forEach((value, i) => {
      if (!Number.isFinite(value)) { open = false; return; }
      path += `${open ? "L" : "M"}${this.x(steps[i]).toFixed(1)} ${this.y(value).toFixed(1)}`;
      open = true;
    });
    return path;
  }

  line(s) {
    const sparse = s.values.length <= 40;
    const weight = sparse ? 0 : page.smooth;
    const style = `stroke:${s.colour};stroke-dasharray:${s.dash || "none"}`;
    const crowded = this.series.length > LEGEND;
    const faded = page.marked && s.run !== page.marked ? " faded" : "";
    if (!weight || !crowded) draw(this.svg, "path", { class: (weight ? "raw under" : "smooth") + faded, style, d: this.path(s.steps, s.values) });
    if (weight) draw(this.svg, "path", { class: "smooth" + faded, style, d: this.path(s.steps, smoothed(s.values, weight)) });
    s.values.forEach((value, i) => {
      const x = this.x(s.steps[i]);
      if (typeof value === "string") {
        const y = MARGIN.top + 4;
        draw(this.svg, "path", { class: "odd", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` });
      } else if (sparse) draw(this.svg, "circle", { cx: x, cy: this.y(value), r: 2.5, style: `fill:${s.colour}` });
    });
    s.dot = draw(this.svg, "circle", { r: 3.5, style: `fill:${s.colour}`, visibility: "hidden" });
  }

  // A mark at each step at which a rule began to find something in a metric of this chart.
  findings() {
    const names = this.spec.series.map(([name]) => name);
    const [first, last] = page.span();
    for (const run of this.stack ? [page.run] : page.runs.filter((one) => one.shown)) {
      for (const mark of run.marks) {
        if (mark.step < first || mark.step > last || !mark.metrics.some((name) => names.includes(name))) continue;
        const x = this.x(mark.step).toFixed(1), y = MARGIN.top;
        const group = draw(this.svg, "g", { class: `finding ${mark.weight}`, tabindex: "0", role: "img", "aria-label": `step ${mark.step}: ${mark.title}: ${mark.seen}` });
        draw(group, "line", { x1: x, x2: x, y1: y, y2: this.height - MARGIN.bottom });
        draw(group, "path", { d: `M${x} ${y + 7}l-5 -8h10z` });
        draw(group, "rect", { x: x - 7, y: y - 4, width: 14, height: 18 });
        const where = page.runs.length > 1 ? `${run.name}, step` : "step";
        const show = () => showTip(group, `${where} ${mark.step.toLocaleString("en")}: ${mark.title}`, [["seen", mark.seen], ["means", mark.meaning], ...mark.tries.map((one, i) => [i ? "" : "try", one])], "sentences");
        for (const event of ["pointerenter", "focus"]) group.addEventListener(event, show);
        for (const event of ["pointerleave", "blur"]) group.addEventListener(event, hideTip);
      }
    }
  }

  bands() {
    const steps = this.series[0].steps;
    const under = steps.map(() => 0);
    const last = page.span()[1];
    for (const s of this.series) {
      const from = under.map((v) => this.y(v).toFixed(1));
      s.values.forEach((value, i) => { under[i] += value; });
      const to = under.map((v) => this.y(v).toFixed(1));
      const left = steps.map((step) => this.x(step).toFixed(1));
      const right = steps.map((_, i) => this.x(i + 1 < steps.length ? steps[i + 1] : last).toFixed(1));
      let path = "";
      steps.forEach((_, i) => { path += `${i ? "L" : "M"}${left[i]} ${to[i]}L${right[i]} ${to[i]}`; });
      for (let i = steps.length - 1; i >= 0; i--) path += `L${right[i]} ${from[i]}L${left[i]} ${from[i]}`;
      draw(this.svg, "path", { d: path + "Z", style: `fill:${s.colour};opacity:.82` });
    }
  }

  // Show the values at `step` (null: the last ones) in the chart's head.
  point(step) {
    let shownStep = null;
    const shown = this.series.map((s) => {
      const i = step === null ? s.values.length - 1 : Math.max(indexAt(s.steps, step), 0);
      shownStep = Math.max(shownStep ?? -Infinity, s.steps[i] ?? -Infinity);
      return { s, i, value: s.values[i] };
    });
    const total = this.stack ? shown.reduce((sum, one) => sum + one.value, 0) : 0;
    for (const { s, i, value } of shown) {
      const share = this.stack && total > 0 ? ` s · ${Math.round((100 * value) / total)} %` : "";
      if (s.read) s.read.textContent = number(value) + share;
      if (s.dot) {
        const seen = step !== null && Number.isFinite(value);
        s.dot.setAttribute("visibility", seen ? "visible" : "hidden");
        if (seen) { s.dot.setAttribute("cx", this.x(s.steps[i])); s.dot.setAttribute("cy", this.y(value)); }
      }
    }
    const at = `step ${(step ?? shownStep ?? 0).toLocaleString("en")}`;
    this.read.replaceChildren(step === null ? "" : at + " ");
    if (this.series.length === 1) this.read.append(make("b", {}, number(shown[0].value)));
    else if (this.stack) this.read.append(make("b", {}, number(total) + " s"));
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { this.cursor.setAttribute("x1", this.x(step)); this.cursor.setAttribute("x2", this.x(step)); }
    if (step !== null && page.over === this && this.series.length > LEGEND) this.list(at, shown);
  }

  // The values of a crowded chart, the largest first, beside the pointer.
  list(at, shown) {
    const known = shown.filter(({ value }) => Number.isFinite(value)).sort((a, b) => b.value - a.value);
    showTip(this.svg, at, known.map(({ s, value }) => [s.label, number(value), s.colour]));
  }
}

// The smallest and the largest of many values.
function ends(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

// Facts about what is under the pointer, near it: rows of a name, a value and perhaps the colour of a curve.
function showTip(target, title, lines, kind = "") {
  const tip = document.getElementById("tip");
  tip.className = `tip ${kind}`;
  const table = make("table");
  for (const [name, value, colour] of lines) {
    const swatch = make("i");
    if (colour) swatch.style.background = colour;
    table.append(make("tr", {}, make("td", {}, ...(colour ? [swatch] : []), name), make("td", {}, value)));
  }
  tip.replaceChildren(make("div", { class: "piece" }, title), table);
  tip.hidden = false;
  const box = target.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - tip.offsetWidth - 12);
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${above > 8 ? above : Math.min(box.bottom + 8, innerHeight - tip.offsetHeight - 8)}px`;
}

function hideTip() { document.getElementById("tip").hidden = true; }
