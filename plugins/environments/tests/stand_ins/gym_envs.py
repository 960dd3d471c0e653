"""Gymnasium environments of the tests: `gym_envs:Guess-v0` and others."""

import gymnasium
import numpy


class Guess(gymnasium.Env):
    """Guess the seeded number, in words."""

    action_space = gymnasium.spaces.Text(max_length=5, charset="0123456789")
    observation_space = gymnasium.spaces.Text(max_length=10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(100))
        return "guess", {}

    def step(self, action):
        right = int(action) == self._number
        return ("right" if right else "wrong"), float(right), right, False, {}


class Steering(gymnasium.Env):
    """Actions that no text names."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), numpy.float32)
    observation_space = gymnasium.spaces.Discrete(2)


gymnasium.register("Guess-v0", Guess)
gymnasium.register("Steering-v0", Steering)
