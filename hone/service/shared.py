"""Objects that the parts of the service share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hone.models.files.partial import partial_of
from hone.service.disk.registry import CommandRow, Registry
from hone.service.futures import Futures
from hone.service.machine import Machine
from hone.service.protocol.refusals import BadRequest
from hone.service.quotas import Quotas
from hone.service.settings import ServeConfig

TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Shared:
    """Settings, the machine, the registry, results and quotas of one service."""

    config: ServeConfig
    machine: Machine
    registry: Registry
    futures: Futures
    quotas: Quotas

    @property
    def folder(self) -> Path:
        return self.config.root

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the base model; the first one is shown to clients."""
        path = self.config.model.path
        absolute = [str(Path(path).expanduser().absolute())] if path and Path(path).expanduser().is_dir() else []
        return tuple(dict.fromkeys((*self.config.names, *([path] if path else []), *absolute)))

    @property
    def base_name(self) -> str:
        return self.names[0]

    def make_room(self, tenant: str, size: int) -> None:
        """Have `limits.held_bytes` leave room for a tenant's request of `size` bytes. Raises Busy."""
        for request_id in self.futures.make_room(tenant, size):
            model, _, number = request_id.rpartition(":")
            if number.isdecimal():  # a command's result; others are in memory only
                self.registry.change(CommandRow, "result = NULL", "model = ? AND number = ?", (model, int(number)))

    def check_base(self, name: str | None) -> None:
        """Raise BadRequest unless a client's name of the base model is known."""
        if name is not None and name not in self.names:
            raise BadRequest(f"base_model = {name!r:.200} is not served here; there is {', '.join(self.names)}")

    @cached_property
    def tokenizer_folder(self) -> str:
        """The folder that clients load the tokenizer from; they must see this machine's disk."""
        folder = self.folder / TOKENIZER
        if not folder.is_dir():
            with partial_of(folder) as partial:
                self.machine.tokenizer.save_pretrained(partial)
                partial.rename(folder)
        return str(folder)
