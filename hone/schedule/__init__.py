"""The decisions of asynchronous training and of a training service, without clock, threads or torch.

In reading order: `window` (what is drawn ahead, from which weights it is answered, and what became of it), `seats`
(which replica takes which weights), `journal` (the record of each step), `replay` (a run that repeats it),
`open_draws` (their groups in a checkpoint), `settings`; `lanes` (which command of a service runs next).
"""
