"""The part of Modal's package that hone uses, by the names and arguments of modal 1.6; programs run here."""

from hosted_services import LATE, Machine

from modal import exception

__all__ = ["App", "Image", "Sandbox", "exception"]
SANDBOXES: dict[str, "Sandbox"] = {}
CREATED: list[dict] = []
FAILURES: list[Exception] = []  # what the next calls raise


class Aio:
    """A method with `.aio`, as all of Modal's have."""

    def __init__(self, function):
        self.aio = function


def fail() -> None:
    if FAILURES:
        raise FAILURES.pop(0)


class App:
    async def _lookup(name, *, create_if_missing=False):
        fail()
        return name

    lookup = Aio(_lookup)


class Image:
    @staticmethod
    def from_registry(tag):
        return tag

    @staticmethod
    def debian_slim():
        return "debian_slim"


class Filesystem:
    def __init__(self, machine):
        self._machine = machine
        self.write_bytes = Aio(self._write)

    async def _write(self, data, remote_path):
        fail()
        self._machine.write(remote_path, data)


class Stream:
    def __init__(self, content):
        self._content = content
        self.read = Aio(self._read)

    async def _read(self):
        return self._content


class Process:
    def __init__(self, done):
        self._done = done
        self.stdout = Stream(b"" if done == LATE else done[0])
        self.wait = Aio(self._wait)

    async def _wait(self):
        return -1 if self._done == LATE else self._done[2]


class Sandbox:
    def __init__(self, wanted):
        self._machine = Machine("modal", wanted)
        self.filesystem = Filesystem(self._machine)
        self.exec, self.terminate = Aio(self._exec), Aio(self._terminate)

    async def _create(*, app, image, timeout, idle_timeout, block_network):
        fail()
        wanted = {"app": app, "image": image, "idle_timeout": idle_timeout, "block_network": block_network}
        CREATED.append(wanted)
        made = Sandbox(wanted)
        SANDBOXES[made._machine.folder] = made
        return made

    create = Aio(_create)

    async def _exec(self, *argv, timeout, text):
        fail()
        assert text is False
        return Process(await self._machine.execute(list(argv), timeout))

    async def _terminate(self):
        self._machine.end()
        del SANDBOXES[self._machine.folder]
