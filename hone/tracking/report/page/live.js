// The live page: the server sends what changed of which run, and the page asks for the curves that it shows.
function live() {
  page.rollouts = new Rollouts(document.getElementById("rollouts"), new Served());
  let followed = false;

  const events = new EventSource("events");
  events.addEventListener("open", () => page.lost(""));
  events.addEventListener("error", () => page.lost(events.readyState === EventSource.CLOSED
    ? "hone watch has ended, or was started anew: open the address that it prints." : "The connection is lost; trying again."));
  events.addEventListener("changed", (event) => {
    const told = JSON.parse(event.data);
    for (const row of told.runs) {
      if (!page.runs[row.index]) addRun(row); else Object.assign(page.runs[row.index], row);
    }
    if (page.runs.length > 1 && !page.table) {
      page.table = new Runs(document.getElementById("runs"));
      document.getElementById("runs").hidden = false;
    }
    page.run ??= page.runs[0];
    if (told.charts) buildCharts(told.charts);
    if (page.table) { page.table.show(); if (told.differing) page.table.differ(told.differing); }
    if (told.runs.some((row) => row.index === page.run.index)) refreshRun();
    const loaded = page.load();
    if (!followed) { followed = true; loaded.then(followAddress); } // the place of the rollouts is known then
  });

  let loading = false;
  page.load = async () => {
    if (loading) return;
    loading = true;
    while (await loadOne());
    loading = false;
    document.body.dataset.points = String(page.charts.reduce((sum, chart) => sum + chart.points, 0));
  };

  page.choose = (run) => {
    page.run = run;
    Object.assign(page.rollouts, { chosen: null, picked: false, page: 0 });
    page.table?.show();
    refreshRun();
    for (const chart of page.charts) if (chart.stack) chart.refresh();
    page.load();
  };
}

// Load the curves of one open section for all shown runs that lack its newest; false if nothing is left to load.
async function loadOne() {
  for (const [name, { element, charts }] of page.sections) {
    if (!element.open) continue;
    const lacking = page.runs.filter((run) => run.shown && run.have[name] !== run.version);
    if (!lacking.length) continue;
    const asked = lacking.map((run) => [run, run.version]);
    const answer = await ask("curves", { section: name, run: lacking.map((run) => run.index), points: POINTS });
    if (!answer) return false;
    for (const [run, version] of asked) {
      const found = answer[run.index];
      Object.assign(run.series, unpack(found));
      if (found.phases) run.phases = found.phases;
      run.marks = found.marks;
      run.have[name] = version;
    }
    const before = String(page.ends);
    page.ends = null;
    if (String(page.span()) !== before) page.rescale(); else for (const chart of charts) chart.refresh();
    return true;
  }
  return false;
}

// Put the newest HTML of the chosen run in its places, and ask for its newest rollouts.
async function refreshRun() {
  const run = page.run;
  const title = document.getElementById("chosen");
  title.hidden = !page.table;
  document.getElementById("part-badge").hidden = Boolean(page.table); // the table of runs has the state of each
  title.textContent = run.name;
  page.rollouts.update();
  const parts = await ask("run", { run: run.index });
  if (!parts || run !== page.run) return;
  for (const [name, html] of Object.entries(parts)) {
    const place = document.getElementById(`part-${name}`);
    if (place.dataset.was === html) continue;
    place.dataset.was = html;
    place.innerHTML = html;
  }
  buildMenu();
}
