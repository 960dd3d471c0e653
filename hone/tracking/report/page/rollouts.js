// The rollouts: a filtered, sorted, paged table on the left, by prompt or answer by answer, and one of them on the right.
// All text comes from models and data sets, so it only goes into text nodes, never into HTML.
const ROWS = 20, GROUPS = 5; // on one page

const COLUMNS = [
  { key: "step", title: "step", width: "62px", numeric: true, about: "the training step, or the step after which a set was evaluated" },
  { key: "set", title: "set", width: "80px", show: (row) => row.set ?? "training", about: "training, or the held-out set" },
  { key: "reward", title: "reward", width: "70px", numeric: true, about: REWARD },
  { key: "advantage", title: "advantage", width: "84px", numeric: true, about: ADVANTAGE },
  { key: "relative", title: "to group", width: "76px", numeric: true, about: RELATIVE },
  { key: "length", title: "tokens", width: "64px", numeric: true, about: LENGTH },
  { key: "worst", title: "max gap", width: "76px", numeric: true, about: "the largest difference between a token's log-probs of trainer and rollout engine" },
  { key: "status", title: "status", width: "104px", about: "how the answer ended" },
  { key: "question", title: "question", text: true, about: "the last message of the user" },
  { key: "response", title: "answer", text: true, about: "the text of the policy; of several turns the last" },
];

class Rollouts {
  constructor(host, source) {
    this.host = host;
    this.source = source;
    this.filter = { step: "", set: "", status: "", text: "" };
    this.sort = { key: "step", down: true };
    this.byPrompt = true;
    this.page = 0;
    this.rows = [];
    this.chosen = null; // the number of the row that is read
    this.picked = false; // whether the reader chose it
    this.build();
  }

  get grouped() { return this.byPrompt && this.sort.key === "step"; }

  build() {
    const head = make("div", { class: "rollouts-head" }, make("h2", {}, "Rollouts"));
    this.selects = { step: this.select("step", "all steps"), set: this.select("set", "all sets"), status: this.select("status", "any status") };
    const move = (by) => {
      const steps = this.facets.steps, at = steps.findIndex((s) => String(s) === this.filter.step);
      const to = at < 0 ? (by > 0 ? 0 : steps.length - 1) : Math.min(Math.max(at + by, 0), steps.length - 1);
      this.selects.step.value = this.filter.step = String(steps[to]);
      this.refilter();
    };
    head.append(make("div", { class: "stepper" }, this.button("‹", "previous step", () => move(-1)), this.selects.step, this.button("›", "next step", () => move(1))));
    head.append(this.selects.set, this.selects.status);
    const search = make("input", { type: "search", placeholder: "find in question or answer", "aria-label": "find in question or answer" });
    let waiting = 0;
    search.addEventListener("input", () => {
      this.filter.text = search.value.toLowerCase();
      clearTimeout(waiting);
      if (this.source instanceof Embedded) this.refilter(); else waiting = setTimeout(() => this.refilter(), 250);
    });
    this.groupButton = this.button("by prompt", "put the answers to one prompt together", () => {
      this.byPrompt = !this.grouped;
      if (this.byPrompt) this.sort = { key: "step", down: true };
      this.refilter();
    });
    this.count = make("span", { class: "count" });
    head.append(search, this.groupButton, this.count);
    this.table = make("div", { class: "panel", tabindex: "0" });
    this.table.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.step(by);
    });
    const detail = make("div", { class: "panel detail" });
    this.reader = new Reader(detail);
    this.reader.onChoose = (number) => { this.picked = true; this.chosen = number; this.show(); };
    this.host.append(head, make("div", { class: "reader" }, this.table, detail));
  }

  select(key, all) {
    const select = make("select", { "aria-label": key }, make("option", { value: "" }, all));
    select.addEventListener("change", () => { this.filter[key] = select.value; this.refilter(); });
    return select;
  }

  button(text, title, act) {
    const button = make("button", { type: "button", title }, text);
    button.addEventListener("click", act);
    return button;
  }

  refilter() { this.page = 0; this.chosen = null; this.picked = false; this.update(); }

  // Choose the row `by` places further.
  step(by) {
    const at = this.rows.findIndex((row) => row.number === this.chosen) + by;
    if (at >= 0 && at < this.rows.length) { this.choose(this.rows[at].number); return; }
    const page = this.page + Math.sign(by);
    if (page < 0 || page >= this.pages) return;
    this.page = page;
    this.chosen = null;
    this.update(by < 0);
  }

  choose(number) {
    this.chosen = number;
    this.show();
    this.source.read(number, (group) => this.reader.show(group, number));
  }

  // Ask for the rows again; the chosen one stays chosen. `last`: else choose the last row instead of the first.
  update(last = false) {
    const size = this.grouped ? GROUPS : ROWS;
    const query = { ...this.filter, sort: this.sort.key, down: this.sort.down ? 1 : "", grouped: this.grouped ? 1 : "", first: this.page * size, count: size };
    this.source.find(query, (found) => {
      this.rows = found.rows;
      this.pages = Math.max(Math.ceil(found.units / size), 1);
      this.facets = found.facets;
      const trained = found.rows.some((row) => row.advantage !== null); // held-out answers have no advantage
      this.columns = COLUMNS.filter((c) => (c.key !== "advantage" || trained) && (c.key !== "relative" || !trained) && (c.key !== "set" || found.facets.sets.length > 1) && (c.key !== "question" || !this.grouped));
      this.offer("step", found.facets.steps, (s) => `step ${s.toLocaleString("en")}`);
      this.offer("set", found.facets.sets, String);
      this.offer("status", found.facets.statuses, (s) => s.replaceAll("_", " "));
      this.selects.set.hidden = found.facets.sets.length < 2;
      if (found.indexed === false) setTimeout(() => this.update(), 100); // the server goes on reading
      const waits = found.indexed === false ? " · more are being read" : "";
      this.count.textContent = `${found.matched.toLocaleString("en")} of ${found.all.toLocaleString("en")} rollouts${waits}`;
      this.groupButton.setAttribute("aria-pressed", String(this.grouped));
      document.body.dataset.rows = String(found.matched);
      if (this.host.hidden === Boolean(found.all)) { this.host.hidden = !found.all; buildMenu(); }
      if (this.chosen === null || (found.indexed === false && !this.picked)) {
        const row = last ? found.rows.at(-1) : found.rows[0];
        if (row) this.choose(row.number); else { this.show(); this.reader.empty("Select a rollout to read it."); }
      } else this.show();
    });
  }

  offer(key, values, show) {
    const select = this.selects[key];
    if (select.length === values.length + 1 && select.options[select.length - 1].value === String(values.at(-1) ?? "")) return;
    select.replaceChildren(select.options[0], ...values.map((value) => make("option", { value: String(value) }, show(value))));
    select.value = this.filter[key];
  }

  show() {
    this.table.replaceChildren(this.rows.length ? this.tableOf() : make("div", { class: "empty" }, "No rollout matches the filters."));
  }

  tableOf() {
    const header = make("tr");
    for (const column of this.columns) {
      const sorted = this.sort.key === column.key;
      const arrow = sorted ? (this.sort.down ? " ↓" : " ↑") : "";
      const cell = make("th", { class: `sortable${column.numeric ? " number" : ""}${sorted ? " sorted" : ""}`, scope: "col", title: column.about }, column.title + arrow);
      if (column.width) cell.style.width = column.width;
      cell.addEventListener("click", () => {
        this.sort = { key: column.key, down: sorted ? !this.sort.down : Boolean(column.numeric) };
        this.refilter();
      });
      header.append(cell);
    }
    const body = make("tbody");
    let group = null;
    for (const row of this.rows) {
      if (this.grouped && row.group !== group) body.append(this.groupLine(row));
      group = row.group;
      body.append(this.rowOf(row));
    }
    const table = make("table", {}, make("thead", {}, header), body);
    if (this.pages < 2) return table;
    const turn = (by) => () => { this.page += by; this.chosen = null; this.update(); };
    const back = this.button("‹ previous", "previous page", turn(-1)), on = this.button("next ›", "next page", turn(1));
    back.disabled = this.page === 0;
    on.disabled = this.page >= this.pages - 1;
    const both = document.createDocumentFragment();
    both.append(table, make("div", { class: "pages" }, back, make("span", {}, `page ${(this.page + 1).toLocaleString("en")} of ${this.pages.toLocaleString("en")}`), on));
    return both;
  }

  groupLine(row) {
    const mean = row.members > 1 && row.mean !== null ? ` · mean reward ${number(row.mean)}` : "";
    const told = make("span", { class: "count" }, `${row.members} answer${row.members > 1 ? "s" : ""}${mean}`);
    const cell = make("td", { colspan: String(this.columns.length) }, make("span", { class: "asked" }, glimpse(row.question)), " ", told);
    return make("tr", { class: "group" }, cell);
  }

  rowOf(row) {
    const line = make("tr", row.number === this.chosen ? { class: "chosen" } : {});
    for (const column of this.columns) {
      const cell = make("td", { class: column.numeric ? "number" : column.text ? "text" : "" });
      if (column.key === "status") cell.append(badge(row.status));
      else if (column.text) cell.append(glimpse(row[column.key]) || make("i", { class: "nothing" }, "(empty)"));
      else if (column.key === "relative" || column.key === "advantage") cell.textContent = row[column.key] === null ? "–" : signed(row[column.key]);
      else cell.textContent = column.show ? column.show(row) : column.key === "step" ? row.step.toLocaleString("en") : number(row[column.key]);
      line.append(cell);
    }
    line.addEventListener("click", () => { this.picked = true; this.choose(row.number); });
    return line;
  }
}

// A text on one line, without chat-template tokens, which are the same in every row.
function glimpse(text) {
  const words = text.slice(0, 2000).replaceAll(/<\|im_start\|>\w*|<\|[^|>]*\|>/g, " ").replaceAll(/\s+/g, " ").trim();
  return (words || text.trim()).slice(0, 300);
}
