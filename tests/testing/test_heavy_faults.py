"""Sandboxes, transports and training engines with a fault each: their suites find it."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType

import pytest

from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.sandboxes.base import Ran, check_request, seats
from hone.testing import SandboxContract, TrainingEngineContract, TransportContract
from hone.weights import TRANSPORTS
from tests.testing.faults import failures
from tests.weights.receiving import ProcessReplica

OUTPUT = 64 << 10  # bytes; the suite's limit

# -------------------------------------------------------------------------------------------------------- sandboxes


class Plain:
    """Runs programs in a temporary folder, without any confinement: for trusted programs of these tests only."""

    def __init__(self, host):
        self._host = host
        self._folder = Path(tempfile.mkdtemp())

    async def run(self, argv, *, stdin=b"", files=MappingProxyType({}), wanted=(), timeout_s):
        check_request(argv, [*files, *wanted])
        async with self._host.seats:
            return await asyncio.to_thread(self._run, list(argv), stdin, files, wanted, timeout_s)

    def _run(self, argv, stdin, files, wanted, timeout_s):
        folder = self._host.folder or self._folder
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        argv[0] = sys.executable if argv[0] == "python" else argv[0]
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        limit = ""
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            limit = "time"
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        limit = "output" if len(out) > OUTPUT else limit
        found = {path: (folder / path).read_bytes() for path in wanted if (folder / path).is_file()}
        return self._host.says(process.returncode, out[:OUTPUT], err, limit, found)

    async def close(self):
        subprocess.run(["rm", "-r", str(self._folder)], check=True)


class PlainHost:
    folder = None

    def __init__(self, limits):
        self.seats = asyncio.Semaphore(seats(limits))

    async def start(self):
        return "nothing"

    def open(self):
        return Plain(self)

    async def close(self):
        return None

    def says(self, status, out, err, limit, files):
        return Ran(status, out, err, 0.0, limit, files)


class Patient(PlainHost):
    """Does not say that a program was late."""

    def says(self, status, out, err, limit, files):
        return super().says(status, out, err, "" if limit == "time" else limit, files)


class Cheerful(PlainHost):
    """Programs always succeed."""

    def says(self, status, out, err, limit, files):
        return super().says(0, out, err, limit, files)


class Common(PlainHost):
    """All sandboxes have one folder."""

    def __init__(self, limits):
        super().__init__(limits)
        self._common = tempfile.TemporaryDirectory()
        self.folder = Path(self._common.name)

    async def close(self):
        self._common.cleanup()


@pytest.mark.parametrize(
    ("cls", "checks"),
    [
        (PlainHost, set()),
        (Patient, {"test_a_late_program_is_ended_with_everything_that_it_started"}),
        (
            Cheerful,
            {
                "test_a_program_gets_files_and_input_and_gives_files_and_output",
                "test_what_a_program_does_wrong_is_its_result",
                "test_a_sandbox_keeps_its_files_and_shares_none",
            },
        ),
        (Common, {"test_a_sandbox_keeps_its_files_and_shares_none", "test_programs_run_side_by_side"}),
    ],
)
def test_a_sandbox_with_a_fault_fails_the_check_of_it(cls, checks):
    class Suite(SandboxContract):
        async def make(self, limits):
            return cls(limits)

    found = failures(Suite)
    assert found.keys() - {"test_programs_run_side_by_side"} == checks - {"test_programs_run_side_by_side"}, found


# ------------------------------------------------------------------------------------------------------- transports


def stale(weights):
    """The first version's tensor, whatever is sent."""
    for name, tensor in weights:
        yield name, tensor * 0 + 1 if name == "huge" else tensor


def without_scalars(weights):
    return ((name, tensor) for name, tensor in weights if tensor.dim())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (stale, "version 1 arrived with other values than were sent"),
        (without_scalars, "version 1 arrived as {'scalar': None}"),
    ],
)
def test_a_transport_that_sends_something_else_fails(change, said):
    class Changing(TRANSPORTS.get("ipc")):
        async def send_weights(self, weights, version):
            return await super().send_weights(change(weights), version)

    class Suite(TransportContract):
        def make(self, bucket_bytes, timeout_s, token):
            return Changing(bucket_bytes, timeout_s, token)

        def replica(self, name, ranks, token):
            return ProcessReplica(name, ranks, token)

    found = failures(Suite, "test_every_kind_of_tensor_arrives_bit_for_bit")
    assert found["test_every_kind_of_tensor_arrives_bit_for_bit"].startswith(said), found


def test_a_transport_without_a_token_fails():
    class Open(TRANSPORTS.get("ipc")):
        def __init__(self, bucket_bytes, timeout_s, token):
            super().__init__(bucket_bytes, timeout_s, "guessed")

    class Suite(TransportContract):
        def make(self, bucket_bytes, timeout_s, token):
            return Open(bucket_bytes, timeout_s, token)

        def replica(self, name, ranks, token):
            return ProcessReplica(name, ranks, token)

    assert failures(Suite, "test_another_token_is_refused") == {
        "test_another_token_is_refused": "the sync of version 1 succeeded, and should have failed"
    }


# ---------------------------------------------------------------------------------------------------------- engines


class Warm(Fsdp2Engine):
    """Takes the temperature twice."""

    def infer_batch(self, batch, needs=frozenset()):
        found = super().infer_batch(batch, needs)
        return type(found)(found.logprobs / 1.1, found.entropy)


class Renamed(Fsdp2Engine):
    def get_per_tensor_param(self, adapter_only=False, dtype=None):
        found, config = super().get_per_tensor_param(adapter_only, dtype)
        return ((name.removeprefix("model."), tensor) for name, tensor in found), config


@pytest.mark.parametrize(
    ("cls", "check"),
    [
        (Warm, "test_log_probs_are_those_of_transformers"),
        (Renamed, "test_every_weight_has_the_name_of_the_checkpoint"),
    ],
)
def test_an_engine_with_a_fault_fails_the_check_of_it(cls, check):
    class Suite(TrainingEngineContract):
        backend, device = "fsdp2", "cpu"

        def make(self, spec):
            return cls(spec, "cpu")

    assert failures(Suite, check, "test_a_step_that_is_not_finite_is_skipped").keys() == {check}
