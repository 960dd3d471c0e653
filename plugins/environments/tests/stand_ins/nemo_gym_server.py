"""A resources server that speaks NeMo Gym's HTTP, for the tests: `python nemo_gym_server.py PORT [package]`.

Without `package` the routes are made here, after nemo-gym 0.7; with it that package serves the same counter: a session
counts from `start`, and its reward is 1 if it ends at `goal`. Further values of `kind` make the server misbehave.
"""

import asyncio
import os
import sys
from uuid import uuid4


class Counters:
    """The counts by session."""

    def __init__(self):
        self.counts = {}

    def seed(self, session, row):
        if row.get("kind") == "no session":
            raise ValueError("there is no room")
        self.counts[session] = row["start"]

    async def add(self, session, count):
        if count == -1:
            os._exit(3)
        if count == -2:
            await asyncio.sleep(600)
        self.counts[session] += count
        return {"count": self.counts[session]}

    def verify(self, session, row):
        calls = [one["name"] for one in row["response"]["output"] if one["type"] == "function_call"]
        fair = {"right": float(self.counts[session] == row["goal"]), "calls": float(len(calls))}
        masked = {"mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "no judge"}
        more = masked if row.get("kind") == "masked" else {}
        return {"reward": fair["right"], "reward_components": fair, **more}


def served_here(port):
    from aiohttp import web

    counters = Counters()

    def route(work):
        async def answer(request):
            session = request.cookies.get("session") or str(uuid4())
            try:
                found = await work(session, await request.json())
            except (KeyError, TypeError) as error:
                found = web.json_response({"detail": f"{type(error).__name__}: {error}"}, status=422)
            except ValueError as error:
                found = web.json_response({"detail": str(error)}, status=500)
            found.set_cookie("session", session)
            return found

        return answer

    async def seed(session, row):
        counters.seed(session, row)
        return web.json_response({})

    async def add(session, arguments):
        return web.json_response(await counters.add(session, arguments["count"]))

    async def verify(session, row):
        assert {"id", "object", "created_at", "model", "output"} <= set(row["response"])
        if row.get("kind") == "prose":
            return web.Response(text="well done")
        if row.get("kind") == "no number":
            return web.json_response({"reward": "much"})
        return web.json_response({**row, **counters.verify(session, row)})

    app = web.Application()
    for path, work in (("/seed_session", seed), ("/add", add), ("/verify", verify)):
        app.router.add_post(path, route(work))
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def served_by_the_package(port):
    import uvicorn
    from fastapi import Request
    from nemo_gym.base_resources_server import (
        BaseResourcesServerConfig,
        BaseSeedSessionRequest,
        BaseSeedSessionResponse,
        BaseVerifyRequest,
        BaseVerifyResponse,
        SimpleResourcesServer,
    )
    from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
    from pydantic import BaseModel, ConfigDict

    counters = Counters()

    class Add(BaseModel):
        count: int

    class Seed(BaseSeedSessionRequest):
        model_config = ConfigDict(extra="allow")
        start: int

    class Row(BaseVerifyRequest):
        model_config = ConfigDict(extra="allow")

    class Verified(BaseVerifyResponse):
        model_config = ConfigDict(extra="allow")

    class Counter(SimpleResourcesServer):
        config: BaseResourcesServerConfig

        def setup_webserver(self):
            app = super().setup_webserver()
            app.post("/add")(self.add)
            return app

        async def seed_session(self, request: Request, body: Seed) -> BaseSeedSessionResponse:
            counters.seed(request.session[SESSION_ID_KEY], body.model_dump())
            return BaseSeedSessionResponse()

        async def add(self, request: Request, body: Add) -> dict:
            return await counters.add(request.session[SESSION_ID_KEY], body.count)

        async def verify(self, request: Request, body: Row) -> Verified:
            row = body.model_dump()
            return Verified(**{**row, **counters.verify(request.session[SESSION_ID_KEY], row)})

    config = BaseResourcesServerConfig(host="127.0.0.1", port=port, entrypoint="app.py", name="counter")
    server = Counter(config=config, server_client=ServerClient.model_construct())
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    serve = served_by_the_package if sys.argv[2:] == ["package"] else served_here
    serve(int(sys.argv[1]))
