"""Where workers run: the same worker classes in this process, or (later) as actors on many machines."""

from hone.registry import Registry

RUNTIMES = Registry("runtime", {"local": "hone.runtime.local:LocalWorkerGroup"})
