"""The report page of a run.

`rundata` reads the run folder, `charts` chooses the charts, `answers` are those before and after training, `build`
writes the page from the files in `page/`.
"""
