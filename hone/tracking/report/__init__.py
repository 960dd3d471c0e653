"""The report page of a run, which is also the page of `hone watch`.

`rundata` reads the run folder with `columns` (the metrics by name) and `rows` (rollouts), `charts` chooses the charts,
`head` makes what is HTML, `prediction` compares the forecast of the launch with the run, `answers` are those before and
after training, `build` writes the page from the files in `page/`.
"""
