"""Classes with the methods of Gymnasium, which is not imported."""

import threading


class Guess:
    """Guess a number in six turns; the reward of a turn is minus the distance."""

    def reset(self, seed=None, options=None):
        self.number, self.left = 3, 6
        self.seed = seed
        return "Guess a number.", {}

    def step(self, action):
        self.left -= 1
        try:
            guess = int(action)
        except ValueError:
            return f"{action[:20]!r} is no number.", 0.0, False, self.left == 0, {}
        hint = "right" if guess == self.number else "higher" if guess < self.number else "lower"
        return hint, -abs(guess - self.number), guess == self.number, self.left == 0, {}


class Old(Guess):
    """The interface of gym 0.21, without info and with one `done`; asynchronous; takes the prompt; is closed."""

    closed = 0

    def __init__(self, prompt):
        self.prompt = prompt
        self.level = prompt.row.get("level", 0) + len(prompt.messages)  # there is a prompt, also in the checks

    async def reset(self):
        super().reset(seed=0)
        return self.prompt.messages[-1]["content"][::-1]

    async def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info

    def close(self):
        Old.closed += 1


class Numbered(Guess):
    """Actions that are numbers."""

    action_space = range(4)


class Unmade(Guess):
    """Cannot be made without a size."""

    def __init__(self, size):
        self.size = size


class Broken(Guess):
    """Forgets to return the info."""

    def step(self, action):
        return "lower", 0.0, False


class Slow(Guess):
    """Is made when `go` is set."""

    begun, go, closed = threading.Event(), threading.Event(), threading.Event()

    def __init__(self):
        self.begun.set()
        assert self.go.wait(30)

    def close(self):
        self.closed.set()


class SlowAsync(Slow):
    async def close(self):
        self.closed.set()
