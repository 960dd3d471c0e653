// One rollout: what was asked, said, called and read, token by token, and the other answers to its prompt.
// All text comes from models and data sets, so it only goes into text nodes, never into HTML.

const MODES = [
  ["gap", "trainer − rollout", "colour by the difference between the log-probs of trainer and rollout engine"],
  ["logprob", "log-prob", "colour by the log-prob when the token was sampled"],
  ["version", "weights", "colour by the version of the weights that sampled the token"],
  ["none", "plain", "no colours"],
];

class Reader {
  constructor(host) {
    this.host = host;
    this.mode = "gap";
    this.beside = false;
    this.group = [];
    this.chosen = null;
  }

  empty(text) { this.host.replaceChildren(make("div", { class: "empty" }, text)); this.chosen = null; }

  // Show one row of a group.
  show(group, chosen) {
    const row = group.find((one) => one.number === chosen);
    if (!row) { this.empty("This page does not have that rollout."); return; }
    this.group = group;
    this.chosen = row;
    this.host.replaceChildren();
    const place = `${row.set ? `${row.set}, ` : ""}step ${row.step.toLocaleString("en")}`;
    const anchor = make("a", { href: address(row.number), title: "a link to this rollout" }, "link");
    this.host.append(make("h3", {}, `${row.id} · ${place} `, anchor));
    if (group.length > 1) this.host.append(this.siblings(row));
    this.host.append(this.marks(row));
    if (row.error) this.host.append(make("div", { class: "faults" }, row.error));
    const components = Object.entries(row.components);
    if (components.length) {
      const list = make("div", { class: "components", title: PARTS });
      for (const [name, value] of components) list.append(make("span", {}, `${name} `, make("b", {}, number(value))));
      this.host.append(make("h4", { title: PARTS }, "reward parts"), list);
    }
    for (const [name, text] of Object.entries(row.printed))
      this.host.append(make("h4", { title: "what this function printed while it scored this answer" }, `${name} printed`), make("div", { class: "text-box short" }, text));
    this.host.append(make("h4", { title: "what the model read before its answer, with its chat template" }, "prompt"), make("div", { class: "text-box short" }, row.prompt));
    if (row.conversation.length) this.host.append(make("h4", { title: "what the policy said, called and read, turn by turn" }, "turns and tool calls"), conversation(row.conversation));
    if (this.beside && group.length > 1) this.host.append(this.columns(group));
    else this.host.append(this.head(row, "response"), this.response(row));
    if (row.truth) this.host.append(make("h4", { title: "what the reward functions compared the answer with" }, "ground truth"), make("div", { class: "text-box short" }, row.truth));
  }

  again() { this.show(this.group, this.chosen.number); }

  siblings(row) {
    const line = make("div", { class: "siblings", title: "the answers to this prompt, each with its reward" });
    for (const one of this.group) {
      const button = make("button", { type: "button", "aria-pressed": String(one === row) }, `${sampleOf(one)}  ${number(one.reward)}`);
      button.addEventListener("click", () => { this.show(this.group, one.number); this.onChoose?.(one.number); });
      line.append(button);
    }
    const both = make("button", { type: "button", class: "beside-button", "aria-pressed": String(this.beside) }, "side by side");
    both.addEventListener("click", () => { this.beside = !this.beside; document.querySelector(".reader").classList.toggle("wide", this.beside); this.again(); });
    line.append(both);
    return line;
  }

  columns(group) {
    const grid = make("div", { class: "answers" });
    for (const one of group) grid.append(make("div", { class: "answer" }, make("h4", { title: "number of this answer among those to its prompt" }, sampleOf(one)), this.marks(one), this.response(one)));
    const both = document.createDocumentFragment();
    both.append(this.head(this.chosen, `${group.length} answers to this prompt`), grid);
    return both;
  }

  marks(row) {
    const marks = make("div", { class: "marks" }, badge(row.status), plain(`reward ${number(row.reward)}`, REWARD));
    if (row.advantage !== null) marks.append(plain(`advantage ${signed(row.advantage)}`, ADVANTAGE));
    if (row.relative !== null) marks.append(plain(`${signed(row.relative)} to the group`, RELATIVE));
    marks.append(plain(`${row.length} tokens`, LENGTH), plain(`ended by ${row.stop}`, "why generation ended: stop is the end token, length the limit"));
    if (row.versions.length) marks.append(plain(`weights ${[...new Set(row.versions.map(([v]) => v))].join(", ")}`, "versions of the weights that sampled it; each training step makes one"));
    return marks;
  }

  modeOf(row) {
    const several = new Set(row.versions.map(([version]) => version)).size > 1;
    const possible = { gap: Boolean(row.gap), version: several, logprob: true, none: true };
    return [MODES.filter(([mode]) => possible[mode]), possible[this.mode] ? this.mode : "logprob"];
  }

  head(row, title) {
    const head = make("h4", { title: "the sampled tokens; each tells its log-probs when the pointer is over it" }, title);
    if (!row.tokens.length) return head;
    const [modes, mode] = this.modeOf(row);
    const buttons = make("span", { class: "modes" });
    for (const [name, text, about] of modes) {
      const button = make("button", { type: "button", title: about, "aria-pressed": String(name === mode) }, text);
      button.addEventListener("click", () => { this.mode = name; this.again(); });
      buttons.append(button);
    }
    const scale = { gap: `largest gap ${number(row.worst)}`, logprob: "darker: less likely", version: "a colour for each version of the weights", none: "" }[mode];
    head.append(buttons, make("span", { class: "scale" }, scale));
    return head;
  }

  response(row) {
    const box = make("div", { class: "text-box" });
    if (!row.tokens.length) {
      box.append(row.response.trim() ? row.response : make("i", { class: "nothing" }, "(empty)"));
      return box;
    }
    const mode = this.modeOf(row)[1];
    const most = Math.max(row.worst ?? 0, 1e-6);
    const versions = row.versions.flatMap(([version, count]) => Array(count).fill(version));
    let sampled = 0;
    row.tokens.forEach((text, i) => {
      const logprob = row.logprobs[i], gap = row.gap ? row.gap[i] : null;
      const span = make("span", { class: logprob === null ? "token observed" : "token" }, text.replaceAll("\n", "↵\n"));
      if (mode === "logprob" && Number.isFinite(logprob)) span.style.background = `rgb(var(--hot) / ${Math.min(-logprob / 4, 0.85).toFixed(3)})`;
      if (mode === "gap" && Number.isFinite(gap)) span.style.background = `rgb(var(${gap > 0 ? "--cold" : "--hot"}) / ${Math.min(Math.abs(gap) / most, 1) * 0.75})`;
      const version = logprob === null ? null : versions[sampled++];
      if (mode === "version" && Number.isFinite(version)) span.style.background = `color-mix(in srgb, var(--c${version % 8}) 35%, transparent)`;
      span.addEventListener("pointerenter", () => showTip(span, JSON.stringify(text), facts(logprob, gap, version, i, row.advantages?.[i])));
      span.addEventListener("pointerleave", hideTip);
      box.append(span);
    });
    if (row.hidden) box.append(make("span", { class: "more-tokens" }, ` … ${row.hidden.toLocaleString("en")} more tokens are in rollouts.jsonl.gz`));
    return box;
  }
}

const REWARD = "the weighted sum of the reward parts; empty if scoring failed";
const PARTS = "what each function of the reward gave, before its weight";
const LENGTH = "sampled tokens of the answer";
const ADVANTAGE = "the advantage that the policy was trained with; the mean where tokens have different ones. Filtered and held-out answers have none";
const RELATIVE = "reward minus the mean reward of the answers to this prompt";
const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value));
const sampleOf = (row) => row.id.match(/#\d+.*$/)?.[0] ?? row.id;

// The address of a rollout in this page: the number of its line in rollouts.jsonl.gz, and its run if there are several.
function address(number) {
  return page.runs.length > 1 ? `#rollout=${number}&run=${encodeURIComponent(page.run.name)}` : `#rollout=${number}`;
}

// What the policy said, called and read, turn by turn.
function conversation(turns) {
  const list = make("ol", { class: "conversation" });
  for (const turn of turns) {
    const item = make("li", {}, make("div", { class: "said" }, turn.said));
    for (const call of turn.calls) {
      const line = make("div", { class: "call" }, make("b", {}, call.tool || "?"), ` ${call.arguments} → ${call.result} `);
      line.append(make("span", { class: "scale", title: "time of this call" }, `${number(call.seconds)} s`));
      if (call.fault) line.append(make("span", { class: "badge bad", title: "why the call failed" }, call.fault));
      item.append(line);
    }
    if (!turn.calls.length && turn.read) item.append(make("div", { class: "read" }, turn.read));
    if (turn.reward !== null) item.append(plain(`reward ${number(turn.reward)}`, "the reward that the environment gave for this turn"));
    list.append(item);
  }
  return list;
}

function facts(logprob, gap, version, position, advantage) {
  const lines = [["position", String(position)]];
  if (logprob === null) return [...lines, ["not sampled", "from the environment"]];
  lines.push(["rollout log-prob", number(logprob)]);
  if (Number.isFinite(logprob)) lines.push(["probability", `${number(100 * Math.exp(logprob))} %`]);
  if (gap !== null) lines.push(["trainer − rollout", number(gap)]);
  if (Number.isFinite(advantage)) lines.push(["advantage", signed(advantage)]);
  if (version !== undefined && version !== null) lines.push(["weight version", String(version)]);
  return lines;
}

const STATUSES = {
  ok: "ended by itself, and scored", truncated: "cut at the response limit, and scored",
  env_failed: "the environment failed; not trained on", reward_failed: "scoring failed; not trained on",
  engine_failed: "generation failed; not trained on", filtered: "left out by a filter of the run file",
};

function badge(status) {
  const kind = status === "ok" ? "good" : status === "truncated" || status === "filtered" ? "warn" : "bad";
  return make("span", { class: `badge ${kind}`, title: STATUSES[status] ?? "how the answer ended" }, status.replaceAll("_", " "));
}

const plain = (text, title) => make("span", { class: "badge", title }, text);
