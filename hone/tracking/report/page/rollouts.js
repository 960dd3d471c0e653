// Rollouts: a filtered, sorted, paged table on the left, one rollout token by token on the right.
// All text comes from models and data sets, so it only goes into text nodes, never into HTML.
const PER_PAGE = 20;

const COLUMNS = [
  { key: "step", title: "step", width: "58px", numeric: true },
  { key: "set", title: "set", width: "72px", show: (row) => row.set ?? "training" },
  { key: "reward", title: "reward", width: "70px", numeric: true },
  { key: "length", title: "tokens", width: "64px", numeric: true },
  { key: "gap", title: "max gap", width: "76px", numeric: true },
  { key: "status", title: "status", width: "96px" },
  { key: "prompt", title: "prompt", text: true },
  { key: "response", title: "response", text: true },
];

class Rollouts {
  constructor(host, rows) {
    this.host = host;
    this.rows = rows.map((row, index) => ({ ...row, index, worst: worstGap(row.gap) }));
    this.filter = { step: "", set: "", status: "", text: "" };
    this.sort = { key: "step", down: true };
    this.page = 0;
    this.chosen = null;
    this.mode = rows.some((row) => row.gap) ? "gap" : "logprob";
    this.columns = COLUMNS.filter((c) => c.key !== "set" || rows.some((row) => row.set)).filter((c) => c.key !== "gap" || rows.some((row) => row.gap));
    this.build();
    this.update();
  }

  build() {
    const head = make("div", { class: "rollouts-head" }, make("h2", {}, "Rollouts"));
    const unique = (key) => [...new Set(this.rows.map((row) => row[key] ?? "training"))];
    const steps = unique("step").sort((a, b) => a - b);
    this.stepSelect = this.select("step", "all steps", steps.map((s) => [String(s), `step ${s.toLocaleString("en")}`]));
    const move = (by) => {
      const at = steps.findIndex((s) => String(s) === this.filter.step);
      const to = at < 0 ? (by > 0 ? 0 : steps.length - 1) : Math.min(Math.max(at + by, 0), steps.length - 1);
      this.stepSelect.value = this.filter.step = String(steps[to]);
      this.refilter();
    };
    const stepper = make("div", { class: "stepper" }, this.button("‹", "previous step", () => move(-1)), this.stepSelect, this.button("›", "next step", () => move(1)));
    head.append(stepper);
    const sets = unique("set");
    if (sets.length > 1) head.append(this.select("set", "all sets", sets.map((s) => [s, s])));
    head.append(this.select("status", "any status", unique("status").sort().map((s) => [s, s])));
    const search = make("input", { type: "search", placeholder: "find in prompt or response", "aria-label": "find in prompt or response" });
    search.addEventListener("input", () => { this.filter.text = search.value.toLowerCase(); this.refilter(); });
    this.count = make("span", { class: "count" });
    head.append(search, this.count);
    this.table = make("div", { class: "panel", tabindex: "0" });
    this.table.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.step(by);
    });
    this.detail = make("div", { class: "panel detail" });
    this.host.append(head, make("div", { class: "reader" }, this.table, this.detail));
  }

  select(key, all, options) {
    const select = make("select", { "aria-label": key }, make("option", { value: "" }, all));
    for (const [value, text] of options) select.append(make("option", { value }, text));
    select.addEventListener("change", () => { this.filter[key] = select.value; this.refilter(); });
    return select;
  }

  button(text, title, act) {
    const button = make("button", { type: "button", title }, text);
    button.addEventListener("click", act);
    return button;
  }

  refilter() { this.page = 0; this.chosen = null; this.update(); }

  step(by) {
    const at = this.found.indexOf(this.chosen) + by;
    if (at < 0 || at >= this.found.length) return;
    this.chosen = this.found[at];
    this.page = Math.floor(at / PER_PAGE);
    this.show();
  }

  update() {
    const { step, set, status, text } = this.filter;
    this.found = this.rows.filter((row) =>
      (!step || String(row.step) === step) && (!set || (row.set ?? "training") === set) && (!status || row.status === status) &&
      (!text || row.prompt.toLowerCase().includes(text) || row.response.toLowerCase().includes(text)));
    const { key, down } = this.sort;
    const value = (row) => (key === "gap" ? row.worst : key === "set" ? row.set ?? "" : row[key]);
    const absent = (v) => v === null || v === undefined || (typeof v === "string" && !["set", "status", "prompt", "response"].includes(key));
    this.found.sort((a, b) => {
      const x = value(a), y = value(b);
      if (absent(x) || absent(y)) return absent(x) - absent(y) || a.index - b.index;
      const order = x < y ? -1 : x > y ? 1 : 0;
      return (down ? -order : order) || a.index - b.index;
    });
    if (!this.found.includes(this.chosen)) this.chosen = this.found[0] ?? null;
    this.show();
  }

  show() {
    this.count.textContent = `${this.found.length.toLocaleString("en")} of ${this.rows.length.toLocaleString("en")} rollouts`;
    document.body.dataset.rows = String(this.found.length);
    this.table.replaceChildren(this.found.length ? this.tableOf() : make("div", { class: "empty" }, "No rollout matches the filters."));
    this.showDetail();
  }

  tableOf() {
    const header = make("tr");
    for (const column of this.columns) {
      const sorted = this.sort.key === column.key;
      const arrow = sorted ? (this.sort.down ? " ↓" : " ↑") : "";
      const cell = make("th", { class: `sortable${column.numeric ? " number" : ""}${sorted ? " sorted" : ""}`, scope: "col" }, column.title + arrow);
      if (column.width) cell.style.width = column.width;
      cell.addEventListener("click", () => {
        this.sort = { key: column.key, down: sorted ? !this.sort.down : Boolean(column.numeric) };
        this.refilter();
      });
      header.append(cell);
    }
    const body = make("tbody");
    for (const row of this.found.slice(this.page * PER_PAGE, (this.page + 1) * PER_PAGE)) body.append(this.rowOf(row));
    const table = make("table", {}, make("thead", {}, header), body);
    const pages = Math.ceil(this.found.length / PER_PAGE);
    if (pages < 2) return table;
    const turn = (by) => () => { this.page += by; this.show(); };
    const back = this.button("‹ previous", "previous page", turn(-1)), on = this.button("next ›", "next page", turn(1));
    back.disabled = this.page === 0;
    on.disabled = this.page >= pages - 1;
    const both = document.createDocumentFragment();
    both.append(table, make("div", { class: "pages" }, back, make("span", {}, `page ${this.page + 1} of ${pages}`), on));
    return both;
  }

  rowOf(row) {
    const line = make("tr", row === this.chosen ? { class: "chosen" } : {});
    for (const column of this.columns) {
      const cell = make("td", { class: column.numeric ? "number" : column.text ? "text" : "" });
      if (column.key === "status") cell.append(badge(row.status));
      else if (column.text) cell.textContent = glimpse(row[column.key]);
      else if (column.key === "gap") cell.textContent = number(row.worst);
      else cell.textContent = column.show ? column.show(row) : number(row[column.key]);
      line.append(cell);
    }
    line.addEventListener("click", () => { this.chosen = row; this.show(); });
    return line;
  }

  showDetail() {
    const row = this.chosen;
    this.detail.replaceChildren();
    if (!row) { this.detail.append(make("div", { class: "empty" }, "Select a rollout to read it.")); return; }
    const marks = make("div", { class: "marks" }, badge(row.status), plain(`reward ${number(row.reward)}`), plain(`${row.length} tokens`), plain(`ended by ${row.stop}`));
    if (row.versions.length) marks.append(plain(`weights ${[...new Set(row.versions.map(([v]) => v))].join(", ")}`));
    this.detail.append(make("h3", {}, `${row.id} · ${row.set ? `${row.set}, ` : ""}step ${row.step.toLocaleString("en")}`), marks);
    if (row.error) this.detail.append(make("div", { class: "faults" }, row.error));
    const components = Object.entries(row.components);
    if (components.length) {
      const list = make("div", { class: "components" });
      for (const [name, value] of components) list.append(make("span", {}, `${name} `, make("b", {}, number(value))));
      this.detail.append(make("h4", {}, "reward components"), list);
    }
    this.detail.append(make("h4", {}, "prompt"), make("div", { class: "text-box short" }, row.prompt));
    if (row.conversation.length) this.detail.append(make("h4", {}, "conversation"), conversation(row.conversation));
    this.response(row);
    if (row.truth) this.detail.append(make("h4", {}, "ground truth"), make("div", { class: "text-box short" }, row.truth));
  }

  response(row) {
    const head = make("h4", {}, "response");
    const box = make("div", { class: "text-box" });
    if (!row.tokens.length) {
      box.textContent = row.response;
      this.detail.append(head, box);
      return;
    }
    const modes = make("span", { class: "modes" });
    const several = new Set(row.versions.map(([version]) => version)).size > 1;
    const possible = { gap: Boolean(row.gap), version: several, logprob: true, none: true };
    const names = [["gap", "trainer − rollout"], ["logprob", "log-prob"], ["version", "weights"], ["none", "plain"]].filter(([mode]) => possible[mode]);
    const mode = possible[this.mode] ? this.mode : "logprob";
    for (const [name, title] of names) {
      const button = this.button(title, `colour by ${title}`, () => { this.mode = name; this.showDetail(); });
      button.setAttribute("aria-pressed", String(name === mode));
      modes.append(button);
    }
    const most = Math.max(row.worst ?? 0, 1e-6);
    const scale = { gap: `largest gap ${number(row.worst)}`, logprob: "darker: less likely", version: "a colour for each version of the weights", none: "" }[mode];
    head.append(modes, make("span", { class: "scale" }, scale));
    const versions = row.versions.flatMap(([version, count]) => Array(count).fill(version));
    let sampled = 0;
    row.tokens.forEach((text, i) => {
      const logprob = row.logprobs[i], gap = row.gap ? row.gap[i] : null;
      const span = make("span", { class: logprob === null ? "token observed" : "token" }, text.replaceAll("\n", "↵\n"));
      if (mode === "logprob" && Number.isFinite(logprob)) span.style.background = `rgb(var(--hot) / ${Math.min(-logprob / 4, 0.85).toFixed(3)})`;
      if (mode === "gap" && Number.isFinite(gap)) span.style.background = `rgb(var(${gap > 0 ? "--cold" : "--hot"}) / ${Math.min(Math.abs(gap) / most, 1) * 0.75})`;
      const version = logprob === null ? null : versions[sampled++];
      if (mode === "version" && Number.isFinite(version)) span.style.background = `color-mix(in srgb, var(--c${version % 8}) 35%, transparent)`;
      span.addEventListener("pointerenter", (event) => showTip(event, text, facts(logprob, gap, version, i)));
      span.addEventListener("pointerleave", hideTip);
      box.append(span);
    });
    if (row.hidden) box.append(make("span", { class: "more-tokens" }, ` … ${row.hidden.toLocaleString("en")} more tokens are in rollouts.jsonl.gz`));
    this.detail.append(head, box);
  }
}

// What the policy said, called and read, turn by turn.
function conversation(turns) {
  const list = make("ol", { class: "conversation" });
  for (const turn of turns) {
    const item = make("li", {}, make("div", { class: "said" }, turn.said));
    for (const call of turn.calls) {
      const line = make("div", { class: "call" }, make("b", {}, call.tool || "?"), ` ${call.arguments} → ${call.result} `);
      line.append(make("span", { class: "scale" }, `${number(call.seconds)} s`));
      if (call.fault) line.append(make("span", { class: "badge bad" }, call.fault));
      item.append(line);
    }
    if (!turn.calls.length && turn.read) item.append(make("div", { class: "read" }, turn.read));
    if (turn.reward !== null) item.append(plain(`reward ${number(turn.reward)}`));
    list.append(item);
  }
  return list;
}

function facts(logprob, gap, version, position) {
  const lines = [["position", String(position)]];
  if (logprob === null) return [...lines, ["not sampled", "from the environment"]];
  lines.push(["rollout log-prob", number(logprob)]);
  if (Number.isFinite(logprob)) lines.push(["probability", `${number(100 * Math.exp(logprob))} %`]);
  if (gap !== null) lines.push(["trainer − rollout", number(gap)]);
  if (version !== undefined && version !== null) lines.push(["weight version", String(version)]);
  return lines;
}

// A text on one line, without chat-template tokens, which are the same in every row.
function glimpse(text) {
  const words = text.slice(0, 2000).replaceAll(/<\|im_start\|>\w*|<\|[^|>]*\|>/g, " ").replaceAll(/\s+/g, " ").trim();
  return (words || text).slice(0, 300);
}

function worstGap(gaps) {
  const sizes = (gaps ?? []).filter(Number.isFinite).map(Math.abs);
  return sizes.length ? Math.max(...sizes) : null;
}

function badge(status) {
  const kind = status === "ok" ? "good" : status === "truncated" || status === "filtered" ? "warn" : "bad";
  return make("span", { class: `badge ${kind}` }, status.replaceAll("_", " "));
}

const plain = (text) => make("span", { class: "badge" }, text);

function showTip(event, text, lines) {
  const tip = document.getElementById("tip");
  const table = make("table");
  for (const [name, value] of lines) table.append(make("tr", {}, make("td", {}, name), make("td", {}, value)));
  tip.replaceChildren(make("div", { class: "piece" }, JSON.stringify(text)), table);
  tip.hidden = false;
  const box = event.target.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - tip.offsetWidth - 12);
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

function hideTip() { document.getElementById("tip").hidden = true; }
