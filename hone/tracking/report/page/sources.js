// Where rollouts come from: the data in the page (a report), or the server that it came from (hone watch).
// Both answer the same questions, by calling `done`: at once, or when the server has answered.

const NEUTRAL = ["set", "status", "question", "response"]; // columns that are sorted as text

// Adds to each row its largest gap, and its reward minus the mean of its group's rewards.
function compare(rows) {
  const groups = new Map();
  for (const row of rows) {
    row.worst = worstGap(row.gap);
    if (!groups.has(row.group)) groups.set(row.group, []);
    groups.get(row.group).push(row);
  }
  for (const group of groups.values()) {
    const rewards = group.map((row) => row.reward).filter(Number.isFinite);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    for (const row of group) {
      row.members = group.length;
      row.mean = mean;
      row.relative = mean === null || !Number.isFinite(row.reward) || group.length < 2 ? null : row.reward - mean;
    }
  }
  return groups;
}

function worstGap(gaps) {
  const sizes = (gaps ?? []).filter(Number.isFinite).map(Math.abs);
  return sizes.length ? Math.max(...sizes) : null;
}

class Embedded {
  constructor(rows) {
    this.rows = rows;
    this.groups = compare(rows);
  }

  find(query, done) {
    const { step, set, status, text, sort, down, grouped, first, count } = query;
    const matched = this.rows.filter((row) =>
      (!step || String(row.step) === step) && (!set || (row.set ?? "training") === set) && (!status || row.status === status) &&
      (!text || row.question.toLowerCase().includes(text) || row.prompt.toLowerCase().includes(text) || row.response.toLowerCase().includes(text)));
    const value = (row) => (sort === "set" ? row.set ?? "" : row[sort]);
    const absent = (v) => v === null || v === undefined || (typeof v === "string" && !NEUTRAL.includes(sort));
    matched.sort((a, b) => {
      const x = value(a), y = value(b);
      if (absent(x) || absent(y)) return absent(x) - absent(y) || a.number - b.number;
      const order = x < y ? -1 : x > y ? 1 : 0;
      return (down ? -order : order) || a.number - b.number;
    });
    const facets = { steps: this.unique((row) => row.step).sort((a, b) => a - b), sets: this.unique((row) => row.set ?? "training"), statuses: this.unique((row) => row.status).sort() };
    const whole = { matched: matched.length, all: this.rows.length, facets };
    if (!grouped) return done({ ...whole, rows: matched.slice(first, first + count), units: matched.length });
    const keys = [...new Set(matched.map((row) => row.group))];
    const rows = keys.slice(first, first + count).flatMap((key) => this.groups.get(key));
    done({ ...whole, rows, units: keys.length });
  }

  unique(of) { return [...new Set(this.rows.map(of))]; }

  read(number, done) {
    const row = this.rows.find((one) => one.number === number);
    done(row ? this.groups.get(row.group) : []);
  }
}

class Served {
  constructor() { this.asked = 0; }

  find(query, done) {
    const order = ++this.asked; // only the newest answer counts
    ask("rollouts", { run: page.run.index, ...query }).then((answer) => { if (answer && order === this.asked) done(answer); });
  }

  read(number, done) {
    ask("group", { run: page.run.index, number }).then((answer) => {
      if (!answer) return;
      compare(answer.rows);
      done(answer.rows);
    });
  }
}

// Ask the server; null if it does not answer, which the page says.
async function ask(path, parameters) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) for (const one of [value].flat()) query.append(key, one);
  try {
    const answer = await fetch(`${path}?${query}`);
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
    return await answer.json();
  } catch (error) {
    page.lost(String(error.message));
    return null;
  }
}
