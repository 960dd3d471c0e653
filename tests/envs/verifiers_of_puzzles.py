"""Stands in for the process of Reasoning Gym's verifiers: an answer scores 1 if it is the problem's own."""

import os
import threading

from hone.processes.frames import Kind
from hone.processes.request_loop import RequestLoop

if __name__ == "__main__":
    loop = RequestLoop()
    for frame in loop.requests():
        if frame.kind is Kind.HELLO:
            loop.loaded({})
            continue
        answer = frame.body["answer"]
        if answer == "hang":
            threading.Event().wait()
        if answer == "die":
            os._exit(3)
        loop.reply(frame.batch, {"score": float(answer == frame.body["row"]["entry"]["answer"])})
