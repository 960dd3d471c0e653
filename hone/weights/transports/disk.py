"""Weights through a folder that both sides can read: safetensors files, and a manifest that is written last.

    sender                                              receiver
      <folder>/hone-weights-xxxx/  (0700, locked)          waits for the manifest: its sender lives (lock), no
        v3/part-00000.safetensors.new -> renamed           failure is noted, the deadline has not passed
        v3/manifest.json.new          -> renamed   --->    manifest: right version, signed with the run's token
                                                           reads the parts

It needs no sockets or shared memory, only a common file system, and is slow. The files of a version are removed when
all receivers are done.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hone.weights.base import (
    Arrival,
    CheckpointEngine,
    Intake,
    NamedTensor,
    NamedTensors,
    Offer,
    Payload,
    Sent,
    WeightReceiver,
    WeightSyncError,
)
from hone.weights.digests.digest import new_digest
from hone.weights.digests.packed import Packed, pack, size_of, together
from hone.weights.transports.bucketed.folders import OwnFolder, is_free

MANIFEST, FAILURE = "manifest.json", "failure"
POLL_S = 0.01


class DiskEngine(CheckpointEngine):
    """Writes the weights to files in a folder that the servers can read."""

    transport = "disk"

    def __init__(self, bucket_bytes: int, timeout_s: float, token: str, folder: Path | None = None) -> None:
        """`folder`: where the files go, under the same path for every receiver; default: the temporary folder."""
        super().__init__(bucket_bytes, timeout_s, token)
        self._root = folder
        self._own: OwnFolder | None = None
        self._place: Path | None = None

    def build_topology(self, ranks: Mapping[str, int]) -> None:
        """Nothing to do: any number of receivers can read the same files."""

    def prepare(self, version: int, payload: Payload) -> Offer:
        if self._own is None:
            if self._root is not None:
                self._root.mkdir(parents=True, exist_ok=True)
            self._own = OwnFolder(self._root)
        self._place = self._own.path / f"v{version}-{secrets.token_hex(4)}"
        self._place.mkdir()
        address = {"folder": str(self._own.path), "place": self._place.name}
        return Offer(self.transport, version, payload, self.timeout_s, address)

    async def init_process_group(self) -> None:
        """Nothing to do: receivers do not connect."""

    async def send_weights(self, weights: NamedTensors, version: int) -> Sent:
        if self._place is None:
            raise WeightSyncError("the sync has not been prepared")
        try:
            manifest = _write_parts(self._place, weights, self.bucket_bytes)
        except BaseException as error:
            _write_text(self._place / FAILURE, f"{type(error).__name__}: {error}")
            raise
        manifest = {"version": version, "place": self._place.name, **manifest}
        manifest["mac"] = _mac(self._token, manifest)
        _write_text(self._place / MANIFEST, json.dumps(manifest))
        return Sent(version, manifest["digest"], manifest["tensors"], manifest["bytes"], len(manifest["parts"]))

    async def finalize(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)

    async def close(self) -> None:
        await self.finalize()
        if self._own is not None:
            self._own.close()
            self._own = None

    @classmethod
    def receiver(cls, offer: Offer, rank: int, token: str) -> WeightReceiver:
        return DiskReceiver(offer, rank, token)


class DiskReceiver(WeightReceiver):
    """A rank's side."""

    def init_process_group(self) -> None:
        """Check the offer. There is no connection: the signed manifest proves who wrote it."""
        for name in ("folder", "place"):
            if not isinstance(self.offer.address.get(name), str):
                raise WeightSyncError(f"{self._name}: the offer has no {name}")
        if "/" in self.offer.address["place"] or is_free(Path(self.offer.address["folder"])):
            raise WeightSyncError(f"{self._name}: no sender of weights at {self.offer.address['folder']}")

    def stream(self, intake: Intake) -> Iterator[Arrival]:
        place = Path(self.offer.address["folder"]) / self.offer.address["place"]
        manifest = self._wait_for_manifest(place)
        count = 0
        for part in manifest["parts"]:
            path = place / part["name"]
            try:
                with safe_open(path, framework="pt") as tensors:
                    names = tensors.keys()
                    if sorted(names) != sorted(part["tensors"]):
                        raise WeightSyncError(f"{self._name}: {path} holds other tensors than its manifest says")
                    for some in together((name, tensors.get_tensor(name)) for name in part["tensors"]):
                        yield intake.take(_packed(some, intake.copy))
                        count += len(some)
            except (SafetensorError, OSError) as error:
                raise WeightSyncError(f"{self._name}: {path} cannot be read: {error}") from error
        if count != manifest["tensors"]:
            raise WeightSyncError(f"{self._name}: {count} tensors came, the sender counted {manifest['tensors']}")
        self.expected = manifest["digest"]

    def finalize(self, failure: str = "", digest: str = "") -> None:
        """Nothing to do: the replica reports the outcome itself."""

    @property
    def _name(self) -> str:
        return f"{self.offer.replica}/{self.rank}"

    def _wait_for_manifest(self, place: Path) -> Mapping[str, Any]:
        deadline = time.monotonic() + self.offer.timeout_s
        about = f"weight version {self.offer.version}"
        while not (place / MANIFEST).is_file():
            if (place / FAILURE).is_file():
                reason = (place / FAILURE).read_text(encoding="utf-8")
                raise WeightSyncError(f"{self._name}: the sender gave up: {reason}")
            gone = is_free(place.parent) or not place.is_dir()
            if gone and not (place / MANIFEST).is_file():
                why = f"died while {self._name} waited for {place}, or ended that sync"
                raise WeightSyncError(f"{self._name}: the sender of {about} {why}")
            if time.monotonic() > deadline:
                limit = f"{self.offer.timeout_s:g} s"
                raise WeightSyncError(
                    f"{self._name} waited for {place / MANIFEST} ({about}); it was not there in {limit}"
                )
            time.sleep(POLL_S)
        return _read_manifest(place / MANIFEST, self._token, self.offer.version, self._name)


def _packed(tensors: list[NamedTensor], copy: bool) -> Packed:
    """A single tensor would stay where it was read, which may be the file itself."""
    if copy and len(tensors) == 1:
        tensors = [(tensors[0][0], tensors[0][1].clone())]
    return pack(tensors)


def _read_manifest(path: Path, token: str, version: int, who: str) -> Mapping[str, Any]:
    """Read the manifest and check run and version. Raises WeightSyncError."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        mac = manifest.pop("mac")
        genuine = hmac.compare_digest(mac, _mac(token, manifest))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"{who}: {path} is not a manifest of weights: {error!r}") from error
    if not genuine or manifest["place"] != path.parent.name:
        raise WeightSyncError(f"{who}: {path} was not written by a sender that knows this run's token")
    if manifest["version"] != version:
        raise WeightSyncError(f"{who}: {path} is of weight version {manifest['version']}, asked was for {version}")
    return dict(manifest)


def _write_parts(place: Path, weights: NamedTensors, part_bytes: int) -> dict[str, Any]:
    """Write all tensors; return the manifest without version and signature."""
    digest = new_digest("bytes")
    parts: list[dict[str, Any]] = []
    held: dict[str, Tensor] = {}
    tensors = total = size = 0

    def flush() -> None:
        name = f"part-{len(parts):05d}.safetensors"
        try:
            save_file(held, place / f"{name}.new")
        except (SafetensorError, KeyError, ValueError) as error:
            raise WeightSyncError(f"{place / name} cannot be written: {error!r}") from error
        os.replace(place / f"{name}.new", place / name)
        parts.append({"name": name, "tensors": list(held)})
        held.clear()

    for name, tensor in weights:
        host = tensor.detach().cpu().contiguous()
        digest.add(name, host)
        if held and size + size_of(tensor) > part_bytes:
            flush()
            size = 0
        held[name] = host.clone()  # safetensors refuses tensors that share memory
        tensors, total, size = tensors + 1, total + size_of(tensor), size + size_of(tensor)
    if held:
        flush()
    return {"parts": parts, "tensors": tensors, "bytes": total, "digest": digest.hexdigest()}


def _mac(token: str, manifest: Mapping[str, Any]) -> str:
    if not token:
        raise WeightSyncError("the run's token is empty; both sides of a weight sync need the same token")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hmac.digest(token.encode(), b"weight manifest\0" + text.encode(), "sha256").hex()


def _write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
