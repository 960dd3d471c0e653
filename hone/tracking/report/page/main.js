// Builds the page from the data embedded in it.
const data = JSON.parse(document.getElementById("data").textContent);

const page = {
  smooth: 0.6,
  charts: [],
  pending: false,
  at: null,
  // Move the cursor of all charts, at most once per frame.
  point(step) {
    this.at = step;
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      for (const chart of this.charts) if (chart.width) chart.point(this.at);
    });
  },
};

function buildCharts() {
  const sections = new Map();
  for (const spec of data.charts) {
    if (!sections.has(spec.section)) sections.set(spec.section, []);
    sections.get(spec.section).push(spec);
  }
  const all = data.axes.flat();
  const span = [all.reduce((a, b) => Math.min(a, b), Infinity), all.reduce((a, b) => Math.max(a, b), -Infinity)];
  const first = [...sections.values()][0];
  for (const [name, specs] of sections) {
    const grid = make("div", { class: "grid" });
    const id = `section-${name.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
    const count = make("span", { class: "count" }, `${specs.length} chart${specs.length > 1 ? "s" : ""}`);
    const section = make("details", { id }, make("summary", {}, make("h2", {}, name), count), grid);
    section.open = specs === first;
    for (const spec of specs) {
      const chart = new Chart(spec, data, span);
      page.charts.push(chart);
      grid.append(chart.host);
    }
    document.getElementById(specs === first ? "first" : "others").append(section);
    link(id, name, () => { section.open = true; });
    if (specs === first && document.getElementById("beside")) link("beside", "Before and after");
    if (specs === first && data.rollouts.length) link("rollouts", "Rollouts");
  }
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const chart = page.charts.find((one) => one.host === target);
      if (chart && Math.round(target.clientWidth) - 24 !== chart.width) chart.draw();
    }
  });
  for (const chart of page.charts) { chart.draw(); sizes.observe(chart.host); }
}

function link(id, text, open) {
  const anchor = make("a", { href: `#${id}` }, text);
  if (open) anchor.addEventListener("click", open);
  document.getElementById("sections").append(anchor);
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

buildTools();
if (data.rollouts.length) {
  const host = document.getElementById("rollouts");
  host.hidden = false;
  page.rollouts = new Rollouts(host, data.rollouts);
}
buildCharts();
link("settings", "Run");
document.body.dataset.charts = String(page.charts.length);
document.body.dataset.points = String(page.charts.reduce((sum, chart) => sum + chart.points, 0));
document.body.dataset.ready = "yes";
