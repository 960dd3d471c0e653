"""A server that dies as vLLM does: its engine fails, every open request gets a 500, and a moment later it ends.

python dying_server.py SOCKET MARKER     it dies if MARKER is not there yet, once four requests are open
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

socket, marker = Path(sys.argv[1]), Path(sys.argv[2])
mortal = not marker.exists()
marker.touch()
asked = asyncio.Queue()
failed = asyncio.Event()


@web.middleware
async def guard(request, handler):
    known = request.headers.get("Authorization") == f"Bearer {os.environ['HONE_TOKEN']}"
    return await handler(request) if known else web.Response(status=401)


async def health(request):
    return web.Response(status=503 if failed.is_set() else 200)


async def generate(request):
    if mortal:
        place = asked.qsize()
        asked.put_nowait(request)
        if place == 3:
            failed.set()
            asyncio.get_running_loop().call_later(0.4, os._exit, 1)
        await failed.wait()
        await asyncio.sleep(0.03 * place)  # the callers look at different moments whether it lives
        return web.Response(status=500, text=json.dumps({"error": "the engine is dead"}))
    return web.json_response({"token_ids": [7, 8]})


app = web.Application(middlewares=[guard])
app.add_routes([web.get("/health", health), web.post("/generate", generate)])
web.run_app(app, path=str(socket), print=None)
