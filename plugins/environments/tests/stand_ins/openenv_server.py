"""A game that speaks OpenEnv's WebSocket protocol, for the tests: `python openenv_server.py PORT SESSIONS [core]`.

Without `core` the messages are made here, after the protocol of openenv-core 0.3; with `core` that package serves the
same game. The player looks for the seed modulo 10. Negative numbers make the server misbehave.
"""

import asyncio
import json
import os
import sys
import time

RAISES, DIES, HANGS, PROSE, A_LIST, NO_REWARD, BYTES, HUGE, NO_DONE = range(-1, -10, -1)
ODD = {
    PROSE: "well done",
    A_LIST: "[1]",
    NO_REWARD: json.dumps({"type": "observation", "data": {"observation": {}, "reward": "much", "done": False}}),
    BYTES: b"well done",
    HUGE: json.dumps({"type": "observation", "data": {"observation": {"text": "x" * (17 << 20)}}}),
    NO_DONE: json.dumps({"type": "observation", "data": {"observation": {}, "reward": 1, "done": "perhaps"}}),
}


class Game:
    def __init__(self):
        self.number, self.steps = None, 0

    def reset(self, seed=None, text="guess"):
        self.number = (seed or 0) % 10
        return text, None, False

    def step(self, guess):
        self.steps += 1
        if guess == RAISES:
            raise RuntimeError("the game is broken")
        if guess == HANGS:
            time.sleep(3600)
        if guess == DIES:
            os._exit(3)
        right = guess == self.number
        return "right" if right else "higher" if guess < self.number else "lower", float(right), right


def served_here(port, sessions):
    """The protocol by hand, with messages that no honest server sends."""
    from aiohttp import web

    playing = set()

    def error(code, message, **more):
        return {"type": "error", "data": {"message": message, "code": code, **more}}

    def observation(text, reward, done):
        return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}

    def answer(game, message):
        if message["type"] == "reset":
            return observation(*game.reset(**message["data"]))
        guess = message["data"].get("guess")
        if not isinstance(guess, int):
            missing = {"type": "missing", "loc": ["guess"], "msg": "Field required", "input": message["data"]}
            return error("VALIDATION_ERROR", "Invalid message", errors=[missing])
        try:
            return observation(*game.step(guess))
        except RuntimeError as failure:
            return error("EXECUTION_ERROR", str(failure))

    async def session(request):
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        if len(playing) >= sessions:
            await socket.send_json(error("CAPACITY_REACHED", f"Server at capacity: {len(playing)}/{sessions}"))
            await socket.close()
            return socket
        playing.add(socket)
        game = Game()
        async for received in socket:
            message = received.json()
            guess = message.get("data", {}).get("guess")
            if message["type"] == "close":
                break
            if guess == HANGS:
                continue  # and answer pings
            if isinstance(guess, int) and guess in ODD:
                await (socket.send_bytes if guess == BYTES else socket.send_str)(ODD[guess])
            else:
                await socket.send_json(answer(game, message))
        await asyncio.sleep(0.05)  # an environment takes time to end; until then it holds its session
        playing.discard(socket)
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/ws", session)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def served_by_core(port, sessions):
    """The same game in a server of the package openenv-core."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        guess: int

    class Hint(Observation):
        text: str

    class Playing(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self._game = Game()

        def reset(self, seed=None, text="guess"):
            shown, reward, done = self._game.reset(seed, text)
            return Hint(text=shown, reward=reward, done=done)

        def step(self, action):
            shown, reward, done = self._game.step(action.guess)
            return Hint(text=shown, reward=reward, done=done)

        @property
        def state(self):
            return State(step_count=self._game.steps)

    app = create_fastapi_app(Playing, Guess, Hint, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    serve = served_by_core if sys.argv[3:] == ["core"] else served_here
    serve(int(sys.argv[1]), int(sys.argv[2]))
