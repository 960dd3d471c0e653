// Several runs: which are shown, in what colour, their last figures, and the settings in which they differ.
class Runs {
  constructor(host) {
    this.host = host;
    this.panel = make("div", { class: "panel runs", tabindex: "0" });
    this.diff = make("div", { class: "panel runs" });
    const differing = make("details", { id: "differing" }, make("summary", {}, make("h2", {}, "Settings that differ"), this.diffCount = make("span", { class: "count" })), this.diff);
    host.append(make("div", { class: "rollouts-head" }, make("h2", {}, "Runs"), this.count = make("span", { class: "count" })), this.panel, differing);
  }

  // Draw the table anew.
  show() {
    const titles = [...new Map(page.runs.flatMap((run) => run.figures.map((one) => [one.title, one]))).values()];
    const header = make("tr", {}, make("th", { class: "pick", title: "whether the charts show the run, and its colour" }), make("th", { class: "name", title: "the name of the run folder" }, "run"),
      make("th", { title: "in progress, finished, interrupted, or why the run failed" }, "state"), make("th", { class: "number", title: "training steps that have ended" }, "step"));
    for (const one of titles) header.append(make("th", { class: "number", title: one.about }, one.title));
    header.append(make("th", { class: "number", title: "the sum of all steps, with evaluations and checkpoints" }, "time"));
    const body = make("tbody");
    for (const run of page.runs) body.append(this.rowOf(run, titles));
    this.panel.replaceChildren(make("table", {}, make("thead", {}, header), body));
    this.count.textContent = `${page.runs.filter((run) => run.shown).length} of ${page.runs.length} shown; click on a row to read that run`;
  }

  rowOf(run, titles) {
    const line = make("tr", run === page.run ? { class: "chosen" } : {});
    const box = make("input", { type: "checkbox", "aria-label": `show ${run.name}` });
    box.checked = run.shown;
    box.addEventListener("click", (event) => event.stopPropagation());
    box.addEventListener("change", () => { run.shown = box.checked; page.rescale(); page.load(); this.show(); });
    const swatch = make("i", { class: "swatch" });
    swatch.style.background = `var(--c${run.index % 8})`;
    const step = run.total ? `${run.step.toLocaleString("en")} of ${run.total.toLocaleString("en")}` : run.step.toLocaleString("en");
    line.append(make("td", { class: "pick" }, box, swatch), make("td", { class: "name", title: run.folder }, run.name),
      make("td", {}, make("span", { class: `badge ${run.kind}`, title: run.state }, run.state)), make("td", { class: "number" }, step));
    for (const { title } of titles) {
      const one = run.figures.find((figure) => figure.title === title);
      line.append(make("td", { class: "number", title: one ? one.best : "" }, one ? one.last : "–"));
    }
    line.append(make("td", { class: "number" }, run.time));
    line.addEventListener("click", () => page.choose(run));
    line.addEventListener("pointerenter", () => page.mark(run));
    line.addEventListener("pointerleave", () => page.mark(null));
    return line;
  }

  // Rows of a key and its value in each run; absent values are null.
  differ(rows) {
    this.diffCount.textContent = rows.length ? `${rows.length} key${rows.length > 1 ? "s" : ""}` : "none";
    const header = make("tr", {}, make("th", { class: "name", title: "a key of the run file" }, "key"), ...page.runs.map((run) => make("th", { title: run.folder }, run.name)));
    const body = rows.map(([key, values]) => make("tr", {}, make("td", { class: "name" }, key), ...values.map((value) => make("td", { title: value ?? "" }, value ?? "–"))));
    this.diff.replaceChildren(rows.length ? make("table", {}, make("thead", {}, header), make("tbody", {}, ...body)) : make("div", { class: "empty" }, "All settings are equal."));
  }
}
