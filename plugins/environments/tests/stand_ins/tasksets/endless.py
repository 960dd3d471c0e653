"""A taskset for the tests that has no end."""

import itertools

import verifiers.v1 as vf


class Numbers(vf.Taskset[vf.Task[vf.TaskData]]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield vf.Task(vf.TaskData(prompt=str(number)), self.config.task)


__all__ = ["Numbers"]
