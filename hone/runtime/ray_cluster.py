"""The Ray cluster itself: joined or started, devices of it reserved, and guests on them beside the ranks.

    RaySeat: devices on one machine --open--> RayGuest: an actor there that hosts one object
        of a pool of its own     reserved in a placement group; after the loss of a machine, wherever the pool has room
        shared with ranks        reserved by these already: the same machine, the same devices, nothing more

A guest lives until it is told to leave; Ray ends it when the driver is gone.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hone.config import ConfigError
from hone.platforms.base import PlatformBase, current_platform
from hone.runtime.base import GuestLost
from hone.runtime.ray_patches import LOOPBACK, on_loopback
from hone.runtime.settings import RaySettings

SHARE_OF_CPU = 0.001  # what a rank or server on the CPU reserves: they may outnumber cores, no bundle may be empty
PASSED_ON = ("HONE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_")  # environment variables of the driver that others get too
GLANCE_S = 0.05  # between two looks at whether a guest has answered
AGAIN_S = 0.5  # before a guest is sent out again
ASK_S = 5.0  # how long an answer that is there may take to come


def address_of(settings: RaySettings) -> str:
    """The cluster's address; `local` for one that is started on this machine and has no other."""
    several = max([settings.nodes, *(pool.nodes for pool in settings.pools.values())]) > 1
    return settings.address or ("auto" if several else "local")


def connect(settings: RaySettings) -> None:
    """Join the cluster that the settings name, or start one on this machine; again is fine.

    Raises ConfigError if there is no cluster at the address.
    """
    address = address_of(settings)
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address != "local":
        host = address.rpartition(":")[0]
        here = {"_node_ip_address": host} if host.startswith("127.") else {}  # else Ray asks the machine for its own
        try:
            with on_loopback():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **here)
        except ConnectionError as error:
            raise ConfigError(
                f"runtime.backend.address: there is no Ray cluster at {address!r} ({' '.join(str(error).split())}); "
                "run `ray start` on every machine first"
            ) from error
        return
    with on_loopback():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=LOOPBACK,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """Which devices a pool has; the pool of all roles that have none of their own bears no name."""

    name: str
    nodes: int
    devices: int  # on each node

    @property
    def key(self) -> str:
        """Where it is set."""
        return f"runtime.backend.pools.{self.name}" if self.name else "runtime.backend"

    @property
    def remark(self) -> str:
        return f" (pool {self.name})" if self.name else ""


def passed_on() -> dict[str, str]:
    """The environment that processes elsewhere get from the driver."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


def demand(platform: PlatformBase, devices: int) -> dict[str, float]:
    """What so many devices are in Ray's words."""
    return {platform.ray_resource: devices * (SHARE_OF_CPU if platform.device == "cpu" else 1)}


def reserve(shape: Shape, platform: PlatformBase, start_s: float) -> Any:
    """A placement group with one bundle for each node, of all its devices: the ranks of a node are neighbours.

    Raises ConfigError if the cluster does not have them free within `start_s` seconds.
    """
    strategy = "STRICT_SPREAD" if shape.nodes > 1 else "STRICT_PACK"
    group = placement_group([demand(platform, shape.devices)] * shape.nodes, strategy=strategy)
    if not group.wait(start_s):
        remove_placement_group(group)
        kind = platform.ray_resource
        there = {kind: ray.cluster_resources().get(kind, 0)}
        free = {kind: ray.available_resources().get(kind, 0)}
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        raise ConfigError(
            f"{shape.key}: {shape.nodes} node(s) with {shape.devices} free device(s) each were not to be had "
            f"within start_timeout_s={start_s:g}; the cluster has {alive} node(s) and {there}, of which "
            f"{free} are free"
        )
    return group


def nodes_of(group: Any) -> dict[int, str]:
    """Bundle of a placement group -> id of its node; one on the driver's machine comes first."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    return {bundle: nodes[bundle] for bundle in sorted(nodes, key=lambda one: (nodes[one] != here, one))}


def why_lost(error: RayError) -> str:
    """The reason that Ray gives for the end of an actor, in a few words."""
    told = re.search(r"Worker exit type: (\w+)(?: Worker exit detail: (.*?\.))?", " ".join(str(error).split()))
    return " ".join(filter(None, told.groups())) if told else "its process or its machine has ended"


# ------------------------------------------------------------------------------------------------------------ guests


class _Room:
    """A process beside the ranks. An asynchronous actor: its guest's coroutines run on one event loop."""

    async def enter(
        self, folder: Path, environment: Mapping[str, str], devices: Sequence[str], guest: Any, arguments: Sequence[Any]
    ) -> tuple[str, str]:
        """Make the guest, which is `guest(number of its devices, *arguments)`; gives the machine's address and id."""
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not on {socket.gethostname()}: all machines have to see the run")
        os.chdir(folder)
        os.environ.update(environment)
        platform, context = current_platform(), ray.get_runtime_context()
        devices = devices or context.get_accelerator_ids().get(platform.ray_resource, ())
        if devices and platform.visible_devices_variable:
            os.environ[platform.visible_devices_variable] = ",".join(devices)
        self._guest = guest(len(devices), *arguments)
        return ray.util.get_node_ip_address(), context.get_node_id()

    async def ask(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._guest, method)(*arguments)


class RayCall:
    """A question to a guest that is on its way."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def done(self) -> bool:
        """Whether `answer` has something to say; asking takes no time."""
        return not ray.is_initialized() or bool(ray.wait([self._reference], timeout=0)[0])

    def answer(self) -> Any:
        """The answer. Raises GuestLost if guest or machine has ended, RuntimeError for what the guest raised."""
        if not ray.is_initialized():
            raise GuestLost("the cluster was left")
        try:
            return ray.get(self._reference, timeout=ASK_S)
        except RayTaskError as error:
            raise RuntimeError(f"{type(error.cause).__name__}: {error.cause}") from error
        except RayActorError as error:
            raise GuestLost(why_lost(error)) from error
        except RayError as error:
            raise GuestLost(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


class RayGuest:
    """See `hone.runtime.base.Guest`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.address = ""

    def begin(self, method: str, *arguments: Any) -> RayCall:
        if not ray.is_initialized():
            raise GuestLost("the cluster was left")
        return RayCall(self._actor.ask.remote(method, *arguments))

    async def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        return await _answer(self.begin(method, *arguments), timeout_s)

    async def enter(self, arguments: Sequence[Any], timeout_s: float) -> str:
        """Wait until the guest is there; gives the id of its machine."""
        self.address, node = await _answer(RayCall(self._actor.enter.remote(*arguments)), timeout_s)
        return str(node)

    def leave(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor)


async def _answer(call: RayCall, timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not call.done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        await asyncio.sleep(GLANCE_S)
    return call.answer()


class Reservation:
    """A placement group for guests; given back when no seat refers to it any more."""

    def __init__(self, shape: Shape, settings: RaySettings) -> None:
        connect(settings)
        self.group = reserve(shape, current_platform(), settings.start_timeout_s)
        self._finalizer = weakref.finalize(self, _give_back, self.group)


def _give_back(group: Any) -> None:
    if ray.is_initialized():
        remove_placement_group(group)


class RaySeat:
    """See `hone.runtime.base.Seat`. It keeps what it lies on: a reservation, or the ranks whose devices it shares."""

    is_shared: bool

    def __init__(self, owner: Any, node: str, start_s: float) -> None:
        self._owner = owner
        self._node = node
        self._start_s = start_s
        self.driver: str = ray.util.get_node_ip_address()

    @property
    def is_here(self) -> bool:
        return self._node == ray.get_runtime_context().get_node_id()

    async def open(self, guest: Any, *arguments: Any) -> RayGuest:
        deadline = time.monotonic() + self._start_s
        while True:
            found = RayGuest(ray.remote(_Room).options(max_restarts=0, **self._options()).remote())
            try:
                given = Path.cwd(), passed_on(), self._devices(), guest, arguments
                self._node = await found.enter(given, deadline - time.monotonic())
                return found
            except GuestLost:  # sent to a machine that has just been lost, which Ray did not know yet
                found.leave()
                if time.monotonic() + AGAIN_S > deadline:
                    raise
                await asyncio.sleep(AGAIN_S)
            except TimeoutError as error:
                found.leave()
                raise GuestLost(
                    f"no machine of the cluster had room within runtime.backend.start_timeout_s={self._start_s:g}"
                ) from error
            except BaseException:
                found.leave()
                raise

    def _options(self) -> dict[str, Any]:
        """Where Ray has to start the actor, and what that reserves."""
        where = NodeAffinitySchedulingStrategy(self._node, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": where}

    def _devices(self) -> Sequence[str]:
        """The accelerators to be used, by Ray's names; empty: those that are reserved with the actor."""
        return ()


class SharedSeat(RaySeat):
    """On devices that ranks of the run have."""

    is_shared = True

    def __init__(self, owner: Any, node: str, start_s: float, devices: Sequence[str]) -> None:
        super().__init__(owner, node, start_s)
        self._shared = devices

    def _devices(self) -> Sequence[str]:
        return self._shared


class ReservedSeat(RaySeat):
    """On devices of a pool. While its machine lives it stays there; then it takes any place that is free in the pool,
    also on a machine that Ray has put in the place of the lost one."""

    is_shared = False

    def __init__(self, owner: Reservation, node: str, start_s: float, devices: int, bundle: int) -> None:
        super().__init__(owner, node, start_s)
        self._count = devices
        self._bundle = bundle

    def _options(self) -> dict[str, Any]:
        if self._node not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            self._bundle = -1
        where = PlacementGroupSchedulingStrategy(self._owner.group, placement_group_bundle_index=self._bundle)
        needed = demand(current_platform(), self._count)
        named = {name.lower(): amount for name, amount in needed.items() if name in ("CPU", "GPU")}
        found = {"num_cpus": 0, **{f"num_{kind}s": amount for kind, amount in named.items()}}
        others = {name: amount for name, amount in needed.items() if name not in ("CPU", "GPU")}
        return {**found, "scheduling_strategy": where, **({"resources": others} if others else {})}


def reserved_seats(shape: Shape, settings: RaySettings, count: int, devices: int) -> list[RaySeat]:
    """`count` seats of so many devices each, in a pool of their own, spread over its machines.

    Raises ConfigError if the pool is too small for them, or not to be had.
    """
    room = shape.nodes * (shape.devices // devices)
    if count > room:
        raise ConfigError(
            f"{shape.key}: {shape.nodes} node(s) with {shape.devices} device(s) each have room for {room} server(s) "
            f"of {devices} device(s), and there are {count}; set nodes and devices to more, or rollout.replicas to less"
        )
    owner = Reservation(shape, settings)
    bundles = list(nodes_of(owner.group).items())
    chosen = [bundles[number % len(bundles)] for number in range(count)]
    return [ReservedSeat(owner, node, settings.start_timeout_s, devices, bundle) for bundle, node in chosen]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank is: its machine's id, and Ray's names of its accelerators."""

    node: str
    accelerators: tuple[str, ...]


def shared_seats(owner: Any, ranks: Sequence[RankPlace], start_s: float, count: int, devices: int) -> list[RaySeat]:
    """`count` seats of so many devices each on those of the ranks, from machine to machine and round again.

    Raises ConfigError if no machine has so many.
    """
    machines = dict.fromkeys(rank.node for rank in ranks)
    places: list[list[tuple[str, tuple[str, ...]]]] = []
    for node in machines:
        ids = [one for rank in ranks if rank.node == node for one in rank.accelerators]
        parts = [tuple(ids[first : first + devices]) for first in range(0, len(ids) - devices + 1, devices)]
        if ids and not parts:
            raise ConfigError(
                f"rollout.tensor_parallel = {devices} is more than the {len(ids)} device(s) of a machine's ranks "
                "(runtime.backend.devices)"
            )
        places.append([(node, part) for part in parts or [()]])
    rounds = max(len(one) for one in places)
    order = [one[number] for number in range(rounds) for one in places if number < len(one)]
    chosen = [order[number % len(order)] for number in range(count)]
    return [SharedSeat(owner, node, start_s, part) for node, part in chosen]
