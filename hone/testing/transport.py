"""The contract of a transport of weights: every tensor arrives in other processes as it was sent, or the sync fails."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hone.platforms.base import current_platform
from hone.testing.contract import Broken, Contract, require
from hone.testing.receiver import ReceivingReplica
from hone.types import PauseMode
from hone.weights.base import AdapterTensors, CheckpointEngine, Offer, WeightSyncError
from hone.weights.digests.digest import Method, digest_tensors
from hone.weights.digests.packed import size_of
from hone.weights.sync import CheckpointEngineManager
from hone.weights.transports.bucketed.buckets import DTYPES

Body = Callable[[CheckpointEngineManager], Awaitable[None]]
LAYERS, ROWS, COLUMNS = 8, 40, 64  # tensors of 10 KiB: with the suite's bucket, one to a bucket
LARGE, LARGE_BUCKET = 1280, 4 << 20  # rows and columns: 6.5 MB in float32; bytes
STORED = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64"
FILE_DTYPES = tuple(getattr(torch, name) for name in f"{STORED} float8_e4m3fn float8_e5m2".split())
"""What safetensors stores: for transports by files."""
STALE = "a tensor was lost, stale or changed on the way"


class Receiving(Protocol):
    """A replica whose receiving process can be made to fail; `hone.testing.receiver.ReceivingReplica` is one."""

    name: str
    fault: str

    @property
    def ranks(self) -> int: ...

    @property
    def asked(self) -> list[str]: ...

    @property
    def facts(self) -> Mapping[str, Any]: ...

    @property
    def held(self) -> tuple[Method, str]: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def receive_weights(self, offer: Mapping[str, Any]) -> Sequence[Any]: ...

    async def resume(self) -> None: ...

    async def stop(self, reason: str) -> None: ...

    def replace_rank(self) -> None: ...

    def close(self) -> None: ...


class TransportContract(Contract):
    """Contract of `hone.weights.base.CheckpointEngine`, with receivers in processes of their own."""

    bucket_bytes: ClassVar[int] = 1 << 14
    timeout_s: ClassVar[float] = 30.0
    dtypes: ClassVar[Sequence[torch.dtype]] = tuple(DTYPES.values())  # that the transport carries
    partial: ClassVar[bool] = False  # whether it sends something else than the bytes of all tensors

    def make(self, bucket_bytes: int, timeout_s: float, token: str) -> CheckpointEngine:
        """Return the sending side: `MyEngine(bucket_bytes, timeout_s, token)`."""
        raise NotImplementedError

    def device(self) -> torch.device:
        """Return the device of the weights that are sent: by default that of this process's platform."""
        return current_platform().torch_device(0)

    def replica(self, name: str, ranks: int, token: str) -> Receiving:
        """Return a replica with a process for each rank."""
        return ReceivingReplica(name, ranks, token)

    def setup_method(self) -> None:
        super().setup_method()
        self._token = secrets.token_hex(16)
        self._replicas: list[Receiving] = []

    def teardown_method(self) -> None:
        for replica in self._replicas:
            replica.close()
        super().teardown_method()

    # ------------------------------------------------------------------------------------------------------ checks

    def test_every_kind_of_tensor_arrives_bit_for_bit(self) -> None:
        """Two versions of tensors of every dtype and awkward form arrive with the digest of the sender."""
        replica = self._replica("r0")

        async def body(manager: CheckpointEngineManager) -> None:
            manager.add_replica(replica)
            for version in (1, 2):
                weights = self._every_kind(version)
                metrics = await manager.sync(weights.items(), version)
                found = {name: (kind, tuple(shape)) for name, (kind, shape) in replica.facts.items()}
                expected = {name: (str(one.dtype), tuple(one.shape)) for name, one in weights.items()}
                require(found == expected, f"version {version} arrived as {_difference(found, expected)}")
                method, digest = replica.held
                sent_digest = digest_tensors(weights.items(), method)
                require(digest == sent_digest, f"version {version} arrived with other values than were sent")
                require(metrics["weights/version"].value == version, f"the metrics say {metrics['weights/version']}")
                count = metrics["weights/tensors"].value
                require(count == len(weights), f"the metrics count {count} of {len(weights)} tensors")
                require(manager.versions == {"r0": version}, f"served are {manager.versions}, sent was {version}")
                if not self.partial:
                    sent, size = metrics["weights/bytes"].value, sum(map(size_of, weights.values()))
                    require(sent == size, f"the metrics count {sent} bytes of {size}")
            require(
                replica.asked == ["pause keep", "resume"] * 2,
                f"the replica should pause and resume twice, found {replica.asked}",
            )

        self._run(body)

    def test_large_tensors_arrive_and_are_timed(self) -> None:
        """Tensors larger than a bucket arrive twice with the digest of the sender; the second sync is timed."""
        replica = self._replica("r0")

        async def body(manager: CheckpointEngineManager) -> None:
            manager.add_replica(replica)
            for version in (1, 2):
                table = torch.randn(LARGE, LARGE, generator=torch.Generator().manual_seed(version))
                weights = {"float32": table.to(self.device()), "bfloat16": table.to(torch.bfloat16).to(self.device())}
                metrics = await manager.sync(weights.items(), version)
                method, digest = replica.held
                require(
                    digest == digest_tensors(weights.items(), method), f"version {version} arrived with other values"
                )
                self.figures["GB/s"] = round(metrics["perf/weight_sync_gb_per_s"].value, 2)

        self._run(body, bucket_bytes=LARGE_BUCKET)

    def test_replicas_of_several_ranks_join_and_leave(self) -> None:
        """Between syncs replicas come and go, one of them with two ranks; a new one gets everything."""
        first, second = self._replica("r0", ranks=2), self._replica("r1")
        weights = self._plain()

        async def body(manager: CheckpointEngineManager) -> None:
            manager.add_replica(first)
            await manager.sync(weights.items(), 1)
            manager.add_replica(second)
            weights["layer.3"] += 1
            await manager.sync(weights.items(), 2)
            require(manager.versions == {"r0": 2, "r1": 2}, f"served are {manager.versions}")
            manager.remove_replica("r0")
            weights["layer.4"][0, 0] = 7
            await manager.sync(weights.items(), 3)
            require(manager.versions == {"r1": 3}, f"served are {manager.versions}, r0 had left")
            manager.add_replica(first)
            await manager.sync(weights.items(), 3, only=["r0"])
            await manager.sync(weights.items(), 4)
            require(manager.versions == {"r0": 4, "r1": 4}, f"served are {manager.versions}")

        self._run(body)

    def test_an_adapter_travels_with_its_configuration(self) -> None:
        """An offer says which adapter comes, survives JSON, and does not contain the token."""
        payload = AdapterTensors("tuned", {"r": 4, "target_modules": ["q_proj"]})

        async def play() -> None:
            engine = self._made()
            try:
                engine.build_topology({"r0": 1})
                offer = engine.prepare(3, payload).for_replica("r0").to_json()
                require(self._token not in str(offer), "the offer contains the run's token")
                require(Offer.from_json(offer).payload == payload, f"the offer's payload is {offer['payload']}")
                await engine.finalize()
            finally:
                await engine.close()

        self.wait(play())

    def test_a_killed_receiver_is_named_and_the_next_sync_works(self) -> None:
        """A rank dies at its fourth tensor: the sync names its replica, and a new rank is served afterwards."""
        replica, weights = self._replica("r0", ranks=2), self._plain()
        replica.fault = "dies:4"

        async def body(manager: CheckpointEngineManager) -> None:
            manager.add_replica(replica)
            error = await _failure(manager, weights.items(), 1)
            require(error.replicas == ("r0",), f"the error names the replicas {error.replicas}: {error}")
            require(replica.asked[-1].startswith("stop: "), f"the replica was asked {replica.asked}, not to stop")
            require(manager.versions == {}, f"served are {manager.versions}")
            replica.fault = ""
            replica.replace_rank()
            manager.add_replica(replica)
            await manager.sync(weights.items(), 1)
            require(manager.versions == {"r0": 1}, f"served are {manager.versions}")

        self._run(body)

    def test_another_token_is_refused(self) -> None:
        """A receiver that does not know the run's token gets nothing."""
        unproven = self.replica("r0", 1, "guessed")
        self._replicas.append(unproven)

        async def body(manager: CheckpointEngineManager) -> None:
            manager.add_replica(unproven)
            error = await _failure(manager, self._plain().items(), 1)
            require("token" in str(error), f"the error does not say that the token is wrong: {error}")

        self._run(body, timeout_s=9.0)

    def test_an_error_in_the_stream_reaches_everybody(self) -> None:
        """If gathering the weights fails, the sync raises that error, the replica stops, and a later sync works."""
        replica, weights = self._replica("r0"), self._plain()

        def stream() -> Iterator[tuple[str, Tensor]]:
            yield from list(weights.items())[:5]
            raise ZeroDivisionError("the gather failed")

        async def body(manager: CheckpointEngineManager) -> None:
            manager.add_replica(replica)
            try:
                await manager.sync(stream(), 1)
            except ZeroDivisionError:
                pass
            else:
                raise Broken("a sync whose stream failed returned")
            require("the gather failed" in replica.asked[-1], f"the replica was asked {replica.asked}")
            require(manager.versions == {}, f"served are {manager.versions}")
            manager.add_replica(replica)
            await manager.sync(weights.items(), 2)

        self._run(body)

    def test_a_name_that_comes_twice_is_an_error(self) -> None:
        """Two tensors of one name raise ValueError."""
        replica, weight = self._replica("r0"), torch.zeros(3, device=self.device())

        async def body(manager: CheckpointEngineManager) -> None:
            manager.add_replica(replica)
            try:
                await manager.sync([("w", weight), ("w", weight)], 1)
            except ValueError as error:
                require("'w' was added twice" in str(error), f"the error does not name the tensor: {error}")
            else:
                raise Broken("two tensors of one name were sent")

        self._run(body)

    def test_a_receiver_that_takes_in_something_else_is_caught(self) -> None:
        """A receiver whose loader skips a tensor of the second version serves the old one, and the sync says so."""
        replica, weights = self._replica("r0"), self._plain()

        async def body(manager: CheckpointEngineManager) -> None:
            manager.add_replica(replica)
            await manager.sync(weights.items(), 1)
            weights["layer.3"] += 1
            replica.fault = "skips:layer.3"
            error = await _failure(manager, weights.items(), 2)
            require(STALE in str(error), f"a stale tensor was not the reason of the failure: {error}")
            require(replica.asked[-1] != "resume", "the replica was resumed with a stale tensor")

        self._run(body)

    # ------------------------------------------------------------------------------------------------- how they run

    def _replica(self, name: str, ranks: int = 1) -> Receiving:
        made = self.replica(name, ranks, self._token)
        self._replicas.append(made)
        return made

    def _made(self, timeout_s: float = 0.0, bucket_bytes: int = 0) -> CheckpointEngine:
        return self.make(bucket_bytes or self.bucket_bytes, timeout_s or self.timeout_s, self._token)

    def _run(self, body: Body, timeout_s: float = 0.0, bucket_bytes: int = 0) -> None:
        """Run `await body(manager)`, and close the engine."""

        async def play() -> None:
            engine = self._made(timeout_s, bucket_bytes)
            try:
                await body(CheckpointEngineManager(engine))
            finally:
                await engine.close()

        self.wait(play())

    def _plain(self) -> dict[str, Tensor]:
        return {f"layer.{i}": torch.randn(ROWS, COLUMNS).to(self.device()) for i in range(LAYERS)}

    def _every_kind(self, version: int) -> dict[str, Tensor]:
        """Tensors of every dtype and awkward form: empty, scalar, huge, tied, transposed, sliced, expanded."""
        torch.manual_seed(version)
        where = self.device()
        large, tied = torch.randn(50, 90, device=where), torch.randn(9, 7, device=where)
        weights = {f"dtype.{str(dtype)[6:]}": _raw(dtype, (3, 5)).to(where) for dtype in self.dtypes}
        return weights | {
            "empty": torch.zeros(0, 4, device=where),
            "scalar": torch.tensor(3.5 + version, device=where),
            "huge": torch.randn(130, 97, device=where),
            "tied.embedding": tied,
            "tied.head": tied,
            "transposed": large.T,
            "strided": large[::2, 5:60:3],
            "expanded": torch.randn(1, 6, device=where).expand(4, 6),
            "odd.bytes": _raw(torch.uint8, (1237,)).to(where),
            "huge.transposed": torch.randn(97, 130, dtype=torch.bfloat16, device=where).T,
            "parameter": torch.nn.Parameter(torch.randn(4, 4, device=where)),
            "empty.last": torch.zeros(3, 0, dtype=torch.int8, device=where),
        }


async def _failure(manager: CheckpointEngineManager, weights: Any, version: int) -> WeightSyncError:
    """The error of a sync that has to fail."""
    try:
        await manager.sync(weights, version)
    except WeightSyncError as error:
        return error
    raise Broken(f"the sync of version {version} succeeded, and should have failed")


def _raw(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of any dtype whose bytes are random (of bool: 0 and 1)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    wrong = {name: found.get(name) for name in expected if found.get(name) != expected[name]}
    extra = sorted(found.keys() - expected.keys())
    return f"{wrong or 'as expected'}, and besides {extra}"


__all__ = ["FILE_DTYPES", "Receiving", "TransportContract"]
