// Line charts and stacked areas in SVG. All charts share one cursor: hovering over one shows the same step in all.
const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 46, right: 10, top: 8, bottom: 20 };

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

class Chart {
  constructor(spec, data, span) {
    this.spec = spec;
    this.span = span;
    this.stack = spec.kind === "stack";
    this.log = false;
    this.series = spec.series.map(([name, label], i) => {
      const curve = data.series[name];
      return { name, label, colour: `var(--c${i % 8})`, steps: data.axes[curve.axis], values: curve.values };
    });
    if (this.stack) this.stackUp(data.phases);
    this.host = make("article", { class: this.stack ? "chart wide" : "chart" });
    this.build();
  }

  get points() { return this.series.reduce((sum, s) => sum + s.values.length, 0); }

  // The last band is the part of the step that no phase timed.
  stackUp(phases) {
    this.series.push({ name: "", label: "rest of the step", colour: "var(--faint)" });
    for (const s of this.series) Object.assign(s, { steps: phases.steps, values: s.name ? phases.bands[s.name] : phases.rest });
  }

  build() {
    const head = make("div", { class: "chart-head" });
    const title = make("h3", { title: this.series.map((s) => s.name).filter(Boolean).join("\n") }, this.spec.title);
    this.read = make("span", { class: "read" });
    head.append(title);
    if (this.spec.unit) head.append(make("span", { class: "unit" }, this.spec.unit));
    const finite = this.series.flatMap((s) => s.values).filter((v) => Number.isFinite(v));
    const least = finite.reduce((a, b) => Math.min(a, b), Infinity), most = finite.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!this.stack && least > 0 && most / least > 100) {
      const button = make("button", { class: "log", type: "button", "aria-pressed": "false" }, "log");
      button.addEventListener("click", () => {
        this.log = !this.log;
        button.setAttribute("aria-pressed", String(this.log));
        this.draw();
      });
      head.append(button);
    }
    head.append(this.read);
    this.host.append(head);
    if (this.series.length > 1) {
      this.legend = make("div", { class: "legend" });
      this.series.forEach((s) => {
        s.read = make("b");
        const swatch = make("i");
        swatch.style.background = s.colour;
        this.legend.append(make("span", {}, swatch, s.label + " ", s.read));
      });
      this.host.append(this.legend);
    }
    this.svg = document.createElementNS(SVG, "svg");
    this.host.append(this.svg);
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
      page.point(Math.round(this.span[0] + Math.min(Math.max(share, 0), 1) * (this.span[1] - this.span[0])));
    });
    this.svg.addEventListener("pointerleave", () => page.point(null));
    this.point(null);
  }

  draw() {
    const width = Math.round(this.host.clientWidth) - 24;
    if (width < 60) return; // inside a closed section
    this.width = width;
    this.height = 170;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.scale();
    this.axes();
    if (this.stack) this.bands(); else this.series.forEach((s) => this.line(s));
    this.cursor = draw(this.svg, "line", { class: "cursor", y1: MARGIN.top, y2: this.height - MARGIN.bottom, visibility: "hidden" });
  }

  scale() {
    const inner = this.height - MARGIN.top - MARGIN.bottom;
    const values = this.stack
      ? this.series[0].steps.map((_, i) => this.series.reduce((sum, s) => sum + s.values[i], 0)).concat(0)
      : this.series.flatMap((s) => s.values).filter((v) => Number.isFinite(v));
    let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    if (this.log) [low, high] = [Math.log10(low), Math.log10(high)];
    if (high - low < 1e-12 * Math.max(Math.abs(high), Math.abs(low), 1e-9)) { const pad = Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
    else if (!this.stack) { // extend the axis to 0 for a curve near 0, to 1 for a fraction
      const pad = (high - low) * 0.06;
      if (!this.log && low >= 0 && low < (high - low) * 0.4) low = 0; else low -= pad;
      if (!this.log && high <= 1 && high > 0.9) high = 1; else high += pad;
    } else high *= 1.04;
    this.low = low; this.high = high;
    const [first, last] = this.span;
    const across = this.width - MARGIN.left - MARGIN.right;
    this.x = (step) => MARGIN.left + (last > first ? (step - first) / (last - first) : 0.5) * across;
    this.y = (value) => MARGIN.top + inner - (((this.log ? Math.log10(value) : value) - low) / (high - low)) * inner;
  }

  axes() {
    const decades = Math.floor(this.high) - Math.ceil(this.low) + 1;
    const marks = this.log && decades >= 2
      ? Array.from({ length: decades }, (_, i) => Math.pow(10, Math.ceil(this.low) + i))
      : ticks(this.low, this.high, 5).map((v) => (this.log ? Math.pow(10, v) : v));
    const apart = marks.length > 1 ? marks[1] - marks[0] : Math.abs(marks[0]) || 1;
    for (const value of marks) {
      const y = this.y(value);
      draw(this.svg, "line", { class: "gridline", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y });
      draw(this.svg, "text", { x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, tickText(value, apart));
    }
    const [first, last] = this.span;
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
    const style = `stroke:${s.colour}`;
    draw(this.svg, "path", { class: weight ? "raw under" : "smooth", style, d: this.path(s.steps, s.values) });
    if (weight) draw(this.svg, "path", { class: "smooth", style, d: this.path(s.steps, smoothed(s.values, weight)) });
    s.values.forEach((value, i) => {
      const x = this.x(s.steps[i]);
      if (typeof value === "string") {
        const y = MARGIN.top + 4;
        draw(this.svg, "path", { class: "odd", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` });
      } else if (sparse) draw(this.svg, "circle", { cx: x, cy: this.y(value), r: 2.5, style: `fill:${s.colour}` });
    });
    s.dot = draw(this.svg, "circle", { r: 3.5, style: `fill:${s.colour}`, visibility: "hidden" });
  }

  bands() {
    const steps = this.series[0].steps;
    const under = steps.map(() => 0);
    const last = this.span[1];
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
  }
}
