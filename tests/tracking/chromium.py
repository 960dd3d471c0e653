"""A headless Chromium that tests steer by its own protocol (CDP), for pages that change while time passes."""

import asyncio
import base64
import json
import shutil
import subprocess
import time
from contextlib import asynccontextmanager, contextmanager

import aiohttp

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_S, ANSWER_S, WAIT_S = 60.0, 60.0, 60.0


class Page:
    """One tab."""

    def __init__(self, socket):
        self._socket = socket
        self._asked = 0

    async def call(self, method, **parameters):
        self._asked += 1
        await self._socket.send_json({"id": self._asked, "method": method, "params": parameters})
        while True:
            answer = json.loads((await self._socket.receive(ANSWER_S)).data)
            if answer.get("id") == self._asked:
                assert "error" not in answer, answer
                return answer["result"]

    async def run(self, script):
        """The value of an expression, or of its promise."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, condition):
        """Wait until an expression is true, in a page that has a body."""
        deadline = time.monotonic() + WAIT_S
        while not await self.run(f"Boolean(document.body && ({condition}))"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            await asyncio.sleep(0.05)

    async def open(self, address, width=1400, dark=False):
        """Open a page in a window of this width and theme."""
        await self.call("Page.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=address)

    async def picture(self, path):
        """Write a PNG of what the window shows."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def chromium(folder):
    """A page of a browser that ends with the block; `folder`: for its profile."""
    flags = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-dev-shm-usage"
    process = subprocess.Popen(
        [BROWSER, *flags.split(), "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file, deadline = folder / "DevToolsActivePort", time.monotonic() + START_S
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            assert time.monotonic() < deadline, "Chromium did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                (address,) = [tab["webSocketDebuggerUrl"] for tab in await answer.json() if tab["type"] == "page"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.kill()
        process.wait(30)


@contextmanager
def one_tab(folder):
    """The page of a browser for tests that are no coroutines, and what runs its coroutines: one start for all tests."""
    with asyncio.Runner() as runner:
        browser = chromium(folder)
        page = runner.run(browser.__aenter__())
        try:
            yield page, runner.run
        finally:
            runner.run(browser.__aexit__(None, None, None))
