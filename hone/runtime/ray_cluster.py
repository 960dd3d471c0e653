"""The Ray cluster: join or start it, reserve devices, and start the actors of rollout servers.

    RayDevices: devices on one machine --open--> RayActor: an actor there that hosts one object
        of a pool of its own     reserved in a placement group; after the loss of a machine, wherever the pool has room
        shared with ranks        reserved by these already: the same machine, the same devices, nothing more

An actor lives until `leave`; Ray ends it when the driver ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import signal
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
from hone.runtime.base import ActorLost
from hone.runtime.ray_patches import (
    LOOPBACK,
    end_failed_start,
    forget_token,
    kept_sigterm,
    on_loopback,
    own_token,
)
from hone.runtime.settings import RaySettings

LOG = logging.getLogger("hone")
SHARE_OF_CPU = 0.001  # CPU share of a rank or server: there may be more than cores, and no bundle may be empty
PASSED_ON = ("HONE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_")  # environment variables that the driver passes on
QUIET_S = 5.0  # without devices, before that is said
GLANCE_S = 0.05  # between checks for an actor's answer
DEFAULT_ACTION = None  # of a signal: SIG_DFL of C
AGAIN_S = 0.5  # before a new attempt to start an actor
ASK_S = 5.0  # time limit for fetching a finished answer


def address_of(settings: RaySettings) -> str:
    """The cluster's address; `local`: start a cluster on this machine."""
    several = max([settings.nodes, *(pool.nodes for pool in settings.pools.values())]) > 1
    return settings.address or ("auto" if several else "local")


def connect(settings: RaySettings) -> None:
    """Join the cluster of the settings, or start one on this machine. May be called again.

    Raises ConfigError if there is no cluster at the address, or if none starts here within `start_timeout_s`.
    """
    address = address_of(settings)
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves ranks beside any other busy program
    if address != "local":
        host = address.rpartition(":")[0]
        here: dict[str, Any] = {}
        if host.startswith("127."):  # else Ray asks the machine for its own
            here["_node_ip_address"] = host
        forget_token()  # of an earlier cluster of this process
        try:
            with on_loopback(), kept_sigterm():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **here)
        except ConnectionError as error:
            raise ConfigError(
                f"runtime.backend.address: there is no Ray cluster at {address!r} ({' '.join(str(error).split())}); "
                "run `ray start` on every machine first"
            ) from error
        return
    _start_here(settings)


def _start_here(settings: RaySettings) -> None:
    """Start a cluster on this machine, again and again until `start_timeout_s`: Ray waits 30 s for its own processes.

    A busy machine takes longer to start them.
    """
    begun, attempts = time.monotonic(), 0
    while True:
        attempts += 1
        try:
            with on_loopback(), own_token(), kept_sigterm():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=LOOPBACK,
                )
            return
        except Exception as error:  # Ray has no class of its own for this
            if "timed out" not in str(error).lower():
                raise
            end_failed_start(error)
            reason, passed = " ".join(str(error).split()), time.monotonic() - begun
            if passed > settings.start_timeout_s:
                raise ConfigError(
                    f"{settings.key_of('start_timeout_s')}={settings.start_timeout_s:g}: Ray did not start here in "
                    f"{attempts} attempt(s) and {passed:.0f} s ({reason}); give it more time, or make the machine less "
                    "busy"
                ) from error
            LOG.warning("Ray did not start here within %.0f s, another attempt: %s", passed, reason)


@dataclass(frozen=True, slots=True)
class PoolDevices:
    """The devices of a pool. The run's pool, for roles without their own, has no name."""

    name: str
    nodes: int
    devices: int  # on each node

    @property
    def key(self) -> str:
        """The key in the run file."""
        return f"runtime.backend.pools.{self.name}" if self.name else "runtime.backend"

    @property
    def remark(self) -> str:
        return f" (pool {self.name})" if self.name else ""


def passed_on() -> dict[str, str]:
    """The driver's environment variables that processes on other machines get."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


def demand(platform: PlatformBase, devices: int) -> dict[str, float]:
    """Ray's resources for this number of devices."""
    return {platform.ray_resource: devices * (SHARE_OF_CPU if platform.device == "cpu" else 1)}


def reserve(shape: PoolDevices, platform: PlatformBase, settings: RaySettings) -> Any:
    """A placement group with one bundle for each node, of all its devices: the ranks of a node are neighbours.

    Raises ConfigError if the cluster does not have them within `start_timeout_s`. Where it has them, but others use
    them, it waits for `queue_timeout_s`.
    """
    strategy = "STRICT_SPREAD" if shape.nodes > 1 else "STRICT_PACK"
    group = placement_group([demand(platform, shape.devices)] * shape.nodes, strategy=strategy)
    queue_s, start_s, kind = settings.queue_timeout_s, settings.start_timeout_s, platform.ray_resource
    each = demand(platform, shape.devices)[kind]
    able = sum(node["Alive"] and node["Resources"].get(kind, 0) >= each for node in ray.nodes())
    queued = queue_s is not None and able >= shape.nodes
    longest = (queue_s if queued else None) or start_s
    wanted = f"{shape.nodes} node(s) with {shape.devices} free device(s) each"
    if group.wait(min(QUIET_S, longest)):
        return group
    LOG.warning("waiting for %s of the Ray cluster, for %.0f s at most", wanted, longest)
    if not group.wait(longest - min(QUIET_S, longest)):
        remove_placement_group(group)
        there = {kind: ray.cluster_resources().get(kind, 0)}
        free = {kind: ray.available_resources().get(kind, 0)}
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        raise ConfigError(
            f"{shape.key}: the cluster did not have {wanted} within {'queue' if queued else 'start'}_timeout_s="
            f"{longest:g}; it has {alive} node(s) and {there}, of which {free} are free"
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


# ------------------------------------------------------------------------------------- actors of rollout servers


class _HostedObject:
    """An asynchronous Ray actor, whose object's coroutines run on one event loop."""

    async def enter(
        self,
        folder: Path,
        environment: Mapping[str, str],
        devices: Sequence[str],
        hosted: Any,
        arguments: Sequence[Any],
    ) -> tuple[str, str]:
        """Create the object, `hosted(number of its devices, *arguments)`; return the machine's address and id."""
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not on {socket.gethostname()}: all machines have to see the run")
        # Ray's handler of SIGTERM waits for the coroutines here, of which one lasts as long as its server: the actor
        # would neither end nor answer. Python's own function works in the main thread only.
        ctypes.CDLL(None).signal(signal.SIGTERM, DEFAULT_ACTION)
        os.chdir(folder)
        os.environ.update(environment)
        platform, context = current_platform(), ray.get_runtime_context()
        devices = devices or context.get_accelerator_ids().get(platform.ray_resource, ())
        if devices and platform.visible_devices_variable:
            os.environ[platform.visible_devices_variable] = ",".join(devices)
        self._hosted = hosted(len(devices), *arguments)
        return ray.util.get_node_ip_address(), context.get_node_id()

    async def ask(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._hosted, method)(*arguments)


class RayCall:
    """See `hone.runtime.base.Call`."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def done(self) -> bool:
        """Return whether `answer` will return without waiting."""
        return not ray.is_initialized() or bool(ray.wait([self._reference], timeout=0)[0])

    def answer(self) -> Any:
        """The result. Raises ActorLost if the actor or its machine ended, RuntimeError if its object raised."""
        if not ray.is_initialized():
            raise ActorLost("the cluster was left")
        try:
            return ray.get(self._reference, timeout=ASK_S)
        except RayTaskError as error:
            raise RuntimeError(f"{type(error.cause).__name__}: {error.cause}") from error
        except RayActorError as error:
            raise ActorLost(why_lost(error)) from error
        except RayError as error:
            raise ActorLost(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


class RayActor:
    """See `hone.runtime.base.RemoteActor`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.address = ""

    def begin(self, method: str, *arguments: Any) -> RayCall:
        if not ray.is_initialized():
            raise ActorLost("the cluster was left")
        return RayCall(self._actor.ask.remote(method, *arguments))

    async def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        return await _answer(self.begin(method, *arguments), timeout_s)

    async def enter(self, arguments: Sequence[Any], timeout_s: float) -> str:
        """Wait until the object exists; return the id of the actor's machine."""
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
    """A placement group for rollout servers; removed when nothing refers to it any more."""

    def __init__(self, shape: PoolDevices, settings: RaySettings) -> None:
        connect(settings)
        self.group = reserve(shape, current_platform(), settings)
        self._finalizer = weakref.finalize(self, _give_back, self.group)


def _give_back(group: Any) -> None:
    if ray.is_initialized():
        remove_placement_group(group)


class RayDevices:
    """See `hone.runtime.base.ServerDevices`. Holds a reference to the reservation or the ranks that own the devices."""

    is_shared: bool

    def __init__(self, owner: Any, node: str, start_s: float) -> None:
        self._owner = owner
        self._node = node
        self._start_s = start_s
        self.driver: str = ray.util.get_node_ip_address()

    @property
    def is_here(self) -> bool:
        return self._node == ray.get_runtime_context().get_node_id()

    async def start_actor(self, hosted: Any, *arguments: Any) -> RayActor:
        deadline = time.monotonic() + self._start_s
        while True:
            found = RayActor(ray.remote(_HostedObject).options(max_restarts=0, **self._options()).remote())
            try:
                given = Path.cwd(), passed_on(), self._devices(), hosted, arguments
                self._node = await found.enter(given, deadline - time.monotonic())
                return found
            except ActorLost:  # Ray sent it to a machine that was just lost
                found.leave()
                if time.monotonic() + AGAIN_S > deadline:
                    raise
                await asyncio.sleep(AGAIN_S)
            except TimeoutError as error:
                found.leave()
                raise ActorLost(
                    f"no machine of the cluster had room within runtime.backend.start_timeout_s={self._start_s:g}"
                ) from error
            except BaseException:
                found.leave()
                raise

    def _options(self) -> dict[str, Any]:
        """Ray's options for the actor: its machine and resources."""
        where = NodeAffinitySchedulingStrategy(self._node, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": where}

    def _devices(self) -> Sequence[str]:
        """Ray's names of the accelerators to use; empty: those reserved with the actor."""
        return ()


class SharedDevices(RayDevices):
    """Devices that ranks of the run also use."""

    is_shared = True

    def __init__(self, owner: Any, node: str, start_s: float, devices: Sequence[str]) -> None:
        super().__init__(owner, node, start_s)
        self._shared = devices

    def _devices(self) -> Sequence[str]:
        return self._shared


class ReservedDevices(RayDevices):
    """Devices of a pool, on one machine while it lives; then on any machine of the pool with free devices."""

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


def reserved_devices(shape: PoolDevices, settings: RaySettings, count: int, devices: int) -> list[list[RayDevices]]:
    """Reserve a pool and divide it among `count` servers of `devices` devices each, spread over its machines.

    A server that needs more devices than a machine has gets all devices of several machines. Raises ConfigError if the
    pool is too small, or the cluster does not have it.
    """
    machines = machines_of(devices, shape.devices, shape.key)
    room = shape.nodes // machines if machines > 1 else shape.nodes * (shape.devices // devices)
    if count > room:
        raise ConfigError(
            f"{shape.key}: {shape.nodes} node(s) with {shape.devices} device(s) each have room for {room} server(s) "
            f"of {devices} device(s), but there are {count}; increase nodes or devices, or decrease rollout.replicas"
        )
    owner = Reservation(shape, settings)
    bundles = list(nodes_of(owner.group).items())
    chosen = [bundles[number % len(bundles)] for number in range(count * machines)]
    each = devices // machines
    parts = [ReservedDevices(owner, node, settings.start_timeout_s, each, bundle) for bundle, node in chosen]
    return [[*parts[first : first + machines]] for first in range(0, len(parts), machines)]


def machines_of(devices: int, each: int, key: str) -> int:
    """Return the number of machines with `each` devices for a server of `devices` devices.

    Raises ConfigError if it would use only some devices of one of several; `key` is where `each` comes from.
    """
    if devices <= each:
        return 1
    if devices % each:
        raise ConfigError(
            f"a rollout server has {devices} ranks (rollout.tensor_parallel, and pipeline and data parallel in "
            f"rollout.engine), which is more than the {each} device(s) of a machine ({key}.devices) and no multiple of "
            "it; on several machines a server uses all devices of each"
        )
    return devices // each


@dataclass(frozen=True, slots=True)
class RankDevices:
    """A rank's machine id, and Ray's names of its accelerators."""

    node: str
    accelerators: tuple[str, ...]


def shared_devices(
    owner: Any, ranks: Sequence[RankDevices], start_s: float, count: int, devices: int
) -> list[list[RayDevices]]:
    """Divide the devices of the ranks among `count` servers of `devices` devices each, from machine to machine.

    If one machine has too few devices for a server, it gets devices of several. Raises ConfigError if all have too few.
    """
    owned: dict[str, list[str]] = {}
    for rank in ranks:
        owned.setdefault(rank.node, []).extend(rank.accelerators)
    each = min(len(ids) for ids in owned.values())
    machines = machines_of(devices, each, "runtime.backend") if each else 1  # CPUs have no names
    if machines > len(owned):
        raise ConfigError(
            f"a rollout server has {devices} ranks (rollout.tensor_parallel, and pipeline and data parallel in "
            f"rollout.engine), and the run's ranks have {len(owned)} machine(s) with {each} device(s) "
            "(runtime.backend.nodes and devices)"
        )
    places: list[list[list[tuple[str, tuple[str, ...]]]]] = []  # group of machines, servers of it, parts of a server
    groups = list(owned.items())
    for first in range(0, len(groups) - machines + 1, machines):
        group = groups[first : first + machines]
        if machines > 1:
            places.append([[(node, tuple(ids)) for node, ids in group]])
            continue
        ((node, ids),) = group
        parts = [tuple(ids[start : start + devices]) for start in range(0, len(ids) - devices + 1, devices)]
        places.append([[(node, part)] for part in parts or [()]])
    rounds = max(len(one) for one in places)
    order = [one[number] for number in range(rounds) for one in places if number < len(one)]
    chosen = [order[number % len(order)] for number in range(count)]
    return [[SharedDevices(owner, node, start_s, part) for node, part in parts] for parts in chosen]
