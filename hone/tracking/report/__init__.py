"""The report page of a run.

`rundata` reads the run folder, `charts` chooses the charts, `build` writes the page from the files in `page/`.
"""
