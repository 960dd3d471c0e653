"""Score answers with Reasoning Gym, in a process of its own, because policies wrote them.

{"answer": "42", "row": {"task": ..., "entry": ...}}  -->  {"score": 1.0}  or  {"error": "..."}
"""

from __future__ import annotations

from typing import Any

from hone.data.sources.reasoning_gym import score
from hone.data.sources.reasoning_gym_patches import load_package
from hone.processes.frames import Kind
from hone.processes.request_loop import RequestLoop


def told(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"score": score(asked["answer"], asked["row"])}
    except Exception as error:  # noqa: BLE001  the package's code; it must not end the process
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    loop = RequestLoop()
    for frame in loop.requests():
        if frame.kind is Kind.HELLO:
            load_package()
            loop.loaded({})
        else:
            loop.reply(frame.batch, told(frame.body))


if __name__ == "__main__":
    main()
