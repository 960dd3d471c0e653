"""The live page of runs, as an ASGI application: HTML, curves, rollouts, and a stream of events that say what changed.

    page --GET /events--> `changed`: rows of runs whose files grew        (the page then asks for what it shows)
         --GET /curves, /run, /rollouts, /group-->  JSON

The application checks no token: who serves it does. It only reads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from html import escape
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from hone.tracking.report.answers import ON_PAGE, beside_of, beside_section
from hone.tracking.report.build import page_of
from hone.tracking.report.head import page_parts
from hone.tracking.watch import index
from hone.tracking.watch.runs import LiveRun, Told, Watched

EVERY_S = 1.0  # between two looks at the run folders
ALIVE_S = 15.0  # an event stream without news sends a comment this often, so that both sides see a lost connection
MOST_POINTS = 2000

HEADERS = {"cache-control": "no-store", "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}


class _Json(Response):
    """JSON without spaces; numbers that JSON does not have were made text before."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def application(watched: Watched, every_s: float = EVERY_S) -> FastAPI:
    """The application of these runs; while it runs it looks at their folders every `every_s` seconds."""

    @asynccontextmanager
    async def looking(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(_look(watched, every_s), name="watch")
        try:
            yield
        finally:
            task.cancel()
            for run in watched.runs:
                run.rollouts.close()

    app = FastAPI(openapi_url=None, lifespan=looking)
    pages = _Pages(watched, every_s)
    for path in ("/", "/events", "/run", "/curves", "/rollouts", "/group"):
        endpoint = getattr(pages, path[1:] or "page")
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    return app


async def _look(watched: Watched, every_s: float) -> None:
    """Read what the runs have written, in another thread."""
    while True:
        await asyncio.to_thread(watched.look)
        await asyncio.sleep(every_s)


class _Pages:
    """The answers. Functions without `async` run in a thread of the server's pool."""

    def __init__(self, watched: Watched, every_s: float) -> None:
        self._watched = watched
        self._every_s = every_s

    def page(self) -> Response:
        """The page, with the state of the first run in its places; its script asks for everything else."""
        names = self._watched.names
        title = names[0] if len(names) == 1 else f"{len(names)} runs"
        parts = {**page_parts(self._watched.runs[0].data), "BESIDE": ""}
        embedded: dict[str, Any] = {"live": True, "runs": [], "charts": [], "rollouts": []}
        return HTMLResponse(page_of(title, embedded, parts, live=True), headers=HEADERS)

    async def events(self, request: Request) -> Response:
        """Changes of the runs as server-sent events, until the page is closed."""
        return StreamingResponse(self._events(request), media_type="text/event-stream", headers=HEADERS)

    async def _events(self, request: Request) -> AsyncIterator[str]:
        told, silent_s = Told({}), 0.0
        while not await request.is_disconnected():
            news = await asyncio.to_thread(self._watched.news, told)
            if news:
                yield f"event: changed\ndata: {json.dumps(news, allow_nan=False)}\n\n"
            elif silent_s >= ALIVE_S:
                yield ": still here\n\n"
            silent_s = 0.0 if news or silent_s >= ALIVE_S else silent_s + self._every_s / 2
            await asyncio.sleep(self._every_s / 2)

    def run(self, run: int) -> Response:
        """The parts of the page that are HTML, with the newest figures of one run."""
        one = self._run(run)
        with self._watched.lock:
            parts = page_parts(one.data)
        parts["BESIDE"] = beside_section(beside_of(one.rollouts.of_evaluations(), ON_PAGE))
        if one.rollouts.note:
            parts["NOTES"] += f'<ul class="notes"><li>{escape(one.rollouts.note)}</li></ul>'
        return _Json({name.lower(): html for name, html in parts.items()}, headers=HEADERS)

    def curves(
        self,
        section: str,
        run: Annotated[Sequence[int], Query()],
        points: Annotated[int, Query(ge=10, le=MOST_POINTS)] = MOST_POINTS,
    ) -> Response:
        """The curves of one section's charts, of each run that is asked for."""
        found = {}
        for number in run:
            one = self._run(number)
            with self._watched.lock:
                found[number] = one.curves(section, self._watched.section(section), points)
        return _Json(found, headers=HEADERS)

    def rollouts(self, request: Request, run: int, first: int = 0, count: int = 20) -> Response:
        """A page of the table of rollouts."""
        asked = request.query_params
        query = index.Query(
            step=asked.get("step", ""),
            place=asked.get("set", ""),
            status=asked.get("status", ""),
            text=asked.get("text", ""),
            sort=asked.get("sort", "step"),
            down=bool(asked.get("down")),
            grouped=bool(asked.get("grouped")),
            first=max(first, 0),
            count=min(max(count, 1), 200),
        )
        return _Json(self._run(run).rollouts.find(query), headers=HEADERS)

    def group(self, run: int, number: int) -> Response:
        """All answers to the prompt of one rollout."""
        return _Json({"rows": self._run(run).rollouts.group(number)}, headers=HEADERS)

    def _run(self, number: int) -> LiveRun:
        if not 0 <= number < len(self._watched.runs):
            raise HTTPException(404, f"there is no run {number}")
        return self._watched.runs[number]
