// Builds the page: from the data embedded in it, or from what the server says of the runs and goes on saying.
const data = JSON.parse(document.getElementById("data").textContent);
const POINTS = 500; // of one curve of a live page; the server keeps extremes

const page = {
  smooth: 0.6,
  runs: [],
  run: null, // the one whose tiles, rollouts and settings are shown
  charts: [],
  sections: new Map(), // name -> its element, and its charts
  pending: false,
  at: null,
  over: null, // the chart under the pointer
  marked: null, // the run that stands out

  // Move the cursor of all charts, at most once per frame.
  point(step, chart) {
    this.at = step;
    this.over = chart;
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      for (const chart of this.charts) if (chart.width) chart.point(this.at);
    });
  },

  // The first and the last step of all charts.
  span() {
    if (!this.ends) {
      const steps = this.runs.filter((run) => run.shown).flatMap((run) => Object.values(run.series).flatMap((one) => [one.steps[0], one.steps.at(-1)]));
      this.ends = ends(steps.filter(Number.isFinite));
    }
    return this.ends;
  },

  rescale() { this.ends = null; for (const chart of this.charts) chart.refresh(); },

  mark(run) {
    if (this.marked === run) return;
    this.marked = run;
    for (const chart of this.charts) if (chart.width) chart.draw();
  },

  lost(why) { document.getElementById("lost").hidden = !why; document.getElementById("lost").textContent = why; },

  load() {},
  choose() {},
};

// Curves with their steps, from curves that share lists of steps.
function unpack({ axes, series }) {
  return Object.fromEntries(Object.entries(series).map(([name, { axis, values }]) => [name, { steps: axes[axis], values }]));
}

function buildCharts(specs) {
  const was = new Map([...page.sections].map(([name, { element }]) => [name, element.open]));
  for (const { element } of page.sections.values()) element.remove();
  page.charts = [];
  page.sections.clear();
  for (const spec of specs) {
    if (!page.sections.has(spec.section)) page.sections.set(spec.section, { specs: [], charts: [] });
    page.sections.get(spec.section).specs.push(spec);
  }
  const first = [...page.sections.keys()][0];
  for (const [name, section] of page.sections) {
    const grid = make("div", { class: "grid" });
    const id = `section-${name.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
    const count = make("span", { class: "count" }, `${section.specs.length} chart${section.specs.length > 1 ? "s" : ""}`);
    const element = make("details", { id }, make("summary", {}, make("h2", {}, name), count), grid);
    element.open = was.get(name) ?? name === first;
    element.addEventListener("toggle", () => page.load());
    section.element = element;
    section.charts = section.specs.map((spec) => new Chart(spec));
    page.charts.push(...section.charts);
    grid.append(...section.charts.map((chart) => chart.host));
    document.getElementById(name === first ? "first" : "others").append(element);
  }
  for (const chart of page.charts) { chart.draw(); sizes.observe(chart.host); }
  buildMenu();
}

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = page.charts.find((one) => one.host === target);
    if (chart && Math.round(target.clientWidth) - 24 !== chart.width) chart.draw();
  }
});

const SHORT = { "Rollout correction": "Correction", "Weight sync": "Sync", "Asynchronous schedule": "Schedule", "Time and throughput": "Time" };

function buildMenu() {
  const menu = document.getElementById("sections");
  const link = (id, text, open) => {
    const anchor = make("a", { href: `#${id}` }, text);
    if (open) anchor.addEventListener("click", open);
    menu.append(anchor);
  };
  menu.replaceChildren();
  if (page.table) link("runs", "Runs");
  [...page.sections].forEach(([name, { element }], i) => {
    link(element.id, SHORT[name] ?? name, () => { element.open = true; });
    if (i === 0) afterFirst(link);
  });
  if (!page.sections.size) afterFirst(link);
  link("settings", "Run");
}

function afterFirst(link) {
  if (document.getElementById("beside")) link("beside", "Before and after");
  if (!document.getElementById("rollouts").hidden) link("rollouts", "Rollouts");
}

function buildTools() {
  const smooth = document.getElementById("smooth");
  smooth.addEventListener("input", () => {
    page.smooth = Number(smooth.value);
    for (const chart of page.charts) chart.draw();
  });
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    const dark = chosen === null ? system.matches : chosen;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "light" : "dark";
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme !== "dark";
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

// Show the rollout that the address names.
function followAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const run = page.runs.find((one) => one.name === asked.get("run"));
  if (run && run !== page.run) page.choose(run);
  if (!asked.has("rollout")) return;
  page.rollouts.picked = true;
  page.rollouts.choose(Number(asked.get("rollout")));
  document.getElementById("rollouts").scrollIntoView();
}

function addRun(run) {
  page.runs.push({ index: page.runs.length, dash: Math.floor(page.runs.length / 8), shown: true, series: {}, marks: [], figures: [], have: {}, ...run });
}

function report() {
  for (const run of data.runs) addRun({ ...run, series: unpack(run) });
  page.run = page.runs[0];
  page.rollouts = new Rollouts(document.getElementById("rollouts"), new Embedded(data.rollouts));
  page.rollouts.update();
  buildCharts(data.charts);
}

buildTools();
if (data.live) live(); else report();
window.addEventListener("hashchange", followAddress);
if (!data.live) followAddress();
document.body.dataset.charts = String(page.charts.length);
document.body.dataset.points = String(page.charts.reduce((sum, chart) => sum + chart.points, 0));
document.body.dataset.ready = "yes";
