"""The process of one section of the conformance kit, which `kit` starts."""

from __future__ import annotations

from dataclasses import asdict

from hone.cli.conformance.record import Recorder
from hone.plugins import load_plugins
from hone.processes.request_loop import RequestLoop
from hone.registry import resolve

SECTIONS = {  # in the order in which they run: each relies on those before it
    "device": "hone.cli.conformance.suites:device",
    "kernels": "hone.cli.conformance.kernels:kernels",
    "collectives": "hone.cli.conformance.collectives:collectives",
    "weight sync": "hone.cli.conformance.suites:sharing",
    "engines": "hone.cli.conformance.suites:engines",
    "rollouts": "hone.cli.conformance.suites:rollouts",
}


def main() -> None:
    """Run the checks of the section that the request names; reply with each result, then with the end."""
    loop = RequestLoop()
    requests = loop.requests()
    next(requests)
    load_plugins()
    loop.loaded({})
    for request in requests:
        name = request.body["section"]
        number = request.batch
        resolve(SECTIONS[name])(Recorder(name, lambda result: loop.reply(number, asdict(result))))  # noqa: B023
        loop.reply(number, {"end": True})


if __name__ == "__main__":
    main()
