"""E2B and Daytona against a server of ours that speaks their wires, and Modal against a package of its interface.

The machines of all three are folders here, whose commands are real processes: hone's attendant runs in them.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from aiohttp import web
from hosted_services import KEY, Services, events

from hone.registry import CannotLoad
from hone.sandboxes import SANDBOXES
from hone.sandboxes.base import Limits, SandboxLost, SandboxRefused
from hone.sandboxes.choice import make_sandboxes
from hone.testing import SandboxContract
from hone_hosted_sandboxes import hosted, inside
from hone_hosted_sandboxes.e2b import executed

LIKE = str(Path(__file__).parent / "stand_ins" / "modal_like")
LIMITS = Limits(output_kb=16, memory_mb=256, processes=16, at_once=2)
HTTP = ("e2b", "daytona")
CREATE = {"e2b": "POST /sandboxes", "daytona": "POST /api/sandbox"}
EXECUTE = {"e2b": "POST /process.Process/Start", "daytona": "POST /toolbox/{id}/process/execute"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("DAYTONA_API_KEY", KEY)
    yield
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "modal" or name == "hone_hosted_sandboxes.modal"
    ]:
        del sys.modules[name]


@pytest.fixture
def played(monkeypatch):
    """Run `play(host, services)` with a service on a port of its own."""

    def run(name, play, limits=LIMITS, image=""):
        async def main():
            services = Services()
            url = f"http://127.0.0.1:{await services.start()}"
            if name == "modal":
                monkeypatch.syspath_prepend(LIKE)
            host = make_sandboxes(name, limits, {"e2b": url, "daytona": f"{url}/api"}.get(name, ""), image)
            try:
                async with asyncio.timeout(60):
                    return await play(host, services)
            finally:
                await host.close()
                left = list(services.machines)
                await services.close()
                assert left == []

        return asyncio.run(main())

    return run


class Hosted:
    """A host of sandboxes, and the service that it asks; afterwards the service has no machine left."""

    def __init__(self, host, services):
        self._host, self._services = host, services
        self.open, self.start = host.open, host.start

    async def close(self):
        await self._host.close()
        left = list(self._services.machines)
        await self._services.close()
        assert left == []


class OfService(SandboxContract):
    name = ""

    async def make(self, limits):
        services = Services()
        url = f"http://127.0.0.1:{await services.start()}"
        address = {"e2b": url, "daytona": f"{url}/api"}.get(self.name, "")
        return Hosted(make_sandboxes(self.name, limits, address), services)


class TestE2b(OfService):
    name = "e2b"


class TestDaytona(OfService):
    name = "daytona"


class TestModal(OfService):
    name = "modal"

    @pytest.fixture(autouse=True)
    def _package(self, monkeypatch):
        monkeypatch.syspath_prepend(LIKE)


@pytest.mark.parametrize("name", [*HTTP, "modal"])
def test_limits_of_programs_and_of_what_they_start(played, name):
    async def play(host, _):
        sandbox = host.open()
        late = await sandbox.run(["sh", "-c", "setsid sleep 77.25 & sleep 50"], timeout_s=0.3)
        large = await sandbox.run(["python", "-c", "x = bytearray(1 << 30)"], timeout_s=20)
        fatal = await sandbox.run(["python", "-c", "import os; os.kill(os.getppid(), 9)"], timeout_s=20)
        await sandbox.close()
        return late, large, fatal

    late, large, fatal = played(name, play)
    assert (late.limit, late.ok) == ("time", False)
    assert b"MemoryError" in large.stderr
    assert not fatal.ok  # it got the attendant, or was not allowed to: its own doing either way
    assert "77.25" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=30).stdout


def test_the_program_has_neither_the_word_nor_the_rights_of_the_attendant(played):
    look = "import os,glob; print(os.getuid(), glob.glob('../*.pyz'), [n for n in os.environ if 'KEY' in n])"

    async def play(host, _):
        ran = await host.open().run(["python", "-c", look], timeout_s=20)
        return ran.stdout.decode().split(" ", 1)

    user, rest = played("e2b", play)
    assert rest == "[] []\n"
    assert os.geteuid() != 0 or int(user) > 0


@pytest.mark.parametrize("name", HTTP)
@pytest.mark.parametrize("network", [False, True])
def test_what_a_machine_is_made_of(played, name, network):
    async def play(host, services):
        await host.open().run(["true"], timeout_s=20)
        (machine,) = services.machines.values()
        return machine.wanted

    wanted = played(name, play, Limits(network=network), "theirs")
    image = {"e2b": "templateID", "daytona": "snapshot"}[name]
    assert wanted[image] == "theirs"
    assert (wanted["allow_internet_access"] if name == "e2b" else not wanted["networkBlockAll"]) is network
    assert name == "e2b" or wanted["autoDeleteInterval"] == 0


def test_modal_is_asked_for_an_image_without_a_network(played):
    async def play(host, _):
        await host.open().run(["true"], timeout_s=20)
        return sys.modules["modal"].CREATED[-1]

    wanted = played("modal", play, LIMITS, "python:3.12")
    assert (wanted["image"], wanted["block_network"]) == ("python:3.12", True)


@pytest.mark.parametrize("name", HTTP)
def test_a_busy_service_is_asked_again_and_a_broken_one_is_a_loss(played, name, monkeypatch):
    monkeypatch.setattr(hosted, "WAITS_S", (0.01,))

    async def play(host, services):
        services.answers[CREATE[name]] = deque([429, 503])
        ran = await host.open().run(["true"], timeout_s=20)
        services.answers[CREATE[name]] = deque([500])
        with pytest.raises(SandboxLost, match="answered 500: planned") as broken:
            await host.open().run(["true"], timeout_s=20)
        services.answers[EXECUTE[name]] = deque([502, lambda _: web.Response(text="<html>")])
        for said in ("answered 502", "cut off|not JSON"):
            with pytest.raises(SandboxLost, match=said):
                await host.open().run(["true"], timeout_s=20)
        monkeypatch.setattr(hosted, "CREATE_S", 0.0)
        services.answers[CREATE[name]] = deque([429])
        with pytest.raises(SandboxLost, match=r"answered 429.*\(for 0 s\)"):
            await host.open().run(["true"], timeout_s=20)
        return ran, str(broken.value)

    ran, broken = played(name, play)
    assert ran.ok
    assert KEY not in broken  # the server repeated the headers that it got
    assert "..." in broken


def test_modal_s_errors_are_losses(played, monkeypatch):
    monkeypatch.setattr(hosted, "WAITS_S", (0.01,))

    async def play(host, _):
        modal = sys.modules["modal"]
        modal.FAILURES.append(modal.exception.ResourceExhaustedError("later"))
        sandbox = host.open()
        ran = await sandbox.run(["true"], timeout_s=20)
        modal.FAILURES.append(modal.exception.ServiceError("gone"))
        with pytest.raises(SandboxLost, match="modal: ServiceError: gone"):
            await sandbox.run(["true"], timeout_s=20)
        return ran

    assert played("modal", play).ok


@pytest.mark.parametrize("name", HTTP)
def test_a_machine_that_is_gone_is_a_loss_and_its_removal_is_no_error(played, name):
    async def play(host, services):
        sandbox = host.open()
        await sandbox.run(["true"], timeout_s=20)
        services._end(*services.machines.values())
        with pytest.raises(SandboxLost):
            await sandbox.run(["true"], timeout_s=20)
        await sandbox.close()

    played(name, play)


def test_e2b_s_events():
    lost = [
        (events({"event": {"start": {"pid": 1}}}, error={"code": "unavailable", "message": "vm gone"}), "vm gone"),
        (events({"event": {"start": {"pid": 1}}}), "ended before the process"),
        (events({"event": {"end": {}}}), None),
    ]
    for answer, said in lost:
        if said is None:
            assert executed(answer.body).status == 0
            continue
        with pytest.raises(SandboxLost, match=said):
            executed(answer.body)
    with pytest.raises(SandboxLost, match="cut off"):
        executed(lost[0][0].body[:-3])
    late = events(error={"code": "deadline_exceeded", "message": ""})
    assert executed(late.body).late


def test_a_python_that_lacks_a_module_is_a_loss_and_no_result(played, monkeypatch):
    monkeypatch.setattr(inside, "CARRIED", [path for path in inside.CARRIED if path != "sandboxes/kernel/landlock.py"])
    inside._code.cache_clear()
    try:
        with pytest.raises(SandboxLost, match=r"e2b: its python3 cannot run hone: .*landlock"):
            played("e2b", lambda host, _: host.open().run(["true"], timeout_s=20))
    finally:
        inside._code.cache_clear()


@pytest.mark.parametrize("name", HTTP)
def test_a_program_that_stops_its_attendant_is_late_and_not_lost(played, name, monkeypatch):
    """The service ends it at its own deadline. A program with the attendant's rights does this on purpose."""
    monkeypatch.setattr(hosted, "INSIDE_S", -19.0)  # the service's deadline comes first
    ran = played(name, lambda host, _: host.open().run(["sleep", "30"], timeout_s=20))
    assert (ran.limit, ran.ok) == ("time", False)


@pytest.mark.parametrize("name", HTTP)
def test_a_cancelled_run_leaves_no_machine(played, name):
    async def play(host, services):
        sandbox = host.open()
        creating = asyncio.create_task(sandbox.run(["sleep", "30"], timeout_s=40))
        while not services.machines:
            await asyncio.sleep(0)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        await sandbox.close()
        return len(services.removed), len(services.machines)

    assert played(name, play) == (1, 0)


KILLED = """
import asyncio, sys
from hone_hosted_sandboxes import hosted
from hone.sandboxes.base import Limits
from hone.sandboxes.choice import make_sandboxes
hosted.IDLE_S = hosted.INSIDE_S = hosted.GRACE_S = 0.5
async def main():
    host = make_sandboxes("e2b", Limits(), sys.argv[1])
    await host.open().run(["sleep", "55.125"], timeout_s=1.0)
asyncio.run(main())
"""


def test_the_machine_of_a_killed_hone_ends_with_its_life():
    async def main():
        services = Services()
        port = await services.start()
        url = f"http://127.0.0.1:{port}"
        try:
            hone = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, url)
            async with asyncio.timeout(60):
                while not services.machines:
                    await asyncio.sleep(0.01)
                hone.send_signal(signal.SIGKILL)
                await hone.wait()
                await services.ended.wait()
            return services.machines, [machine.lives for machine in services.removed]
        finally:
            await services.close()

    assert asyncio.run(main()) == ({}, [[3]])  # 1 s for the program, and thrice 0.5 s


@pytest.mark.parametrize("name", HTTP)
def test_a_machine_lives_as_long_as_its_programs_may_take(played, name):
    async def play(host, services):
        sandbox = host.open()
        await sandbox.run(["true"], timeout_s=60)
        (machine,) = services.machines.values()
        await sandbox.run(["true"], timeout_s=60)
        await sandbox.run(["true"], timeout_s=3600)
        return machine.lives

    first, last = played(name, play)
    assert 900 + 60 < first < 900 + 60 + 180
    assert 900 + 3600 < last < 900 + 3600 + 180


def test_what_is_missing_is_said_at_the_start(monkeypatch):
    with pytest.raises(SandboxRefused, match=r"e2b: the url should begin with http.*found 'api.e2b.app'"):
        make_sandboxes("e2b", LIMITS, "api.e2b.app")
    with pytest.raises(CannotLoad, match="needs modal, which is not installed: pip install modal"):
        make_sandboxes("modal", LIMITS)
    for backend in ("auto", "landlock"):
        with pytest.raises(SandboxRefused, match="image"):
            make_sandboxes(backend, LIMITS, "", "python:3.12")
    with pytest.raises(SandboxRefused, match="sandbox_fusion has no images"):
        make_sandboxes("sandbox_fusion", LIMITS, "http://127.0.0.1:9", "python:3.12")
    assert SANDBOXES.get("e2b").configured() == "E2B_API_KEY is set; the service was not asked"
    monkeypatch.delenv("DAYTONA_API_KEY")
    assert SANDBOXES.get("daytona").configured() == "DAYTONA_API_KEY is not set"
    with pytest.raises(SandboxRefused, match="daytona needs its key in the environment variable DAYTONA_API_KEY"):
        make_sandboxes("daytona", LIMITS)


def test_a_wrong_key_is_a_loss_that_names_the_variable(played, monkeypatch):
    monkeypatch.setenv("E2B_API_KEY", "another")

    async def play(host, _):
        with pytest.raises(SandboxLost, match=r"answered 401.*environment variable E2B_API_KEY"):
            await host.start()

    played("e2b", play)
