"""Runtimes: run the same worker classes in this process (`local`), or as actors on many machines (`ray`).

In reading order: `base` (the interface), `settings`, `local`, with `ranks` (peers under torchrun) and `split` (a batch
over ranks); `ray`, with `ray_cluster`, `rank_process` (a rank), `batch_plan` (a batch's way to the ranks) and
`ray_patches`; `traces` (of the run's processes, for Perfetto); `watchdog` (ends a run that hangs);
`foreign_tasks` (tasks of environments on the run's event loop).
"""

from hone.registry import Entry, Registry

RUNTIMES = Registry(
    "runtime",
    {
        "local": "hone.runtime.local:LocalWorkerGroup",
        "ray": Entry("hone.runtime.ray:RayWorkerGroup", "hone.runtime.settings:RaySettings", ("ray",)),
    },
)
