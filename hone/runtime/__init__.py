"""Runtimes: run the same worker classes in this process (`local`), or as actors on many machines (`ray`)."""

from hone.registry import Entry, Registry

RUNTIMES = Registry(
    "runtime",
    {
        "local": "hone.runtime.local:LocalWorkerGroup",
        "ray": Entry("hone.runtime.ray:RayWorkerGroup", "hone.runtime.settings:RaySettings", ("ray",)),
    },
)
