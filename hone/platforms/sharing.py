"""Facts of a platform for weight sync: device memory in another process, process groups over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch


class MemorySharing:
    """Part of a platform. The defaults share nothing, so weights pass through host memory."""

    name: ClassVar[str]
    supports_ipc: ClassVar[bool] = False  # whether another process can open a tensor's device memory
    supports_broadcast: ClassVar[bool] = False  # whether `device_group` makes a group

    def why_no_ipc(self) -> str:
        """Empty if another process can open this process's device memory, else the reason why not."""
        return "" if self.supports_ipc else f"platform {self.name} cannot share device memory between processes"

    def device_uuids(self) -> list[str]:
        """A name for each device that this process sees, equal in every process of the machine; [] if there is none."""
        return []

    def share(self, tensor: torch.Tensor) -> list[Any]:
        """Return the numbers and bytes with which another process opens a device tensor's storage."""
        raise NotImplementedError(self.why_no_ipc())

    def open_shared(self, index: int, handle: Sequence[Any]) -> torch.Tensor:
        """The storage that `share` of another process described, as uint8 on device `index` of this process."""
        raise NotImplementedError(self.why_no_ipc())

    def pin(self, memory: torch.Tensor) -> bool:
        """Register host memory for direct copies from this process's device; whether that was possible.

        Needs `unpin` before the memory is freed. Does nothing in a process that does not use a device.
        """
        return False

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo a `pin` that returned True."""

    def device_group(self, store: Any, rank: int, world: int, timeout_s: float) -> Any:
        """A process group of `torch.distributed` over device memory, for weight sync only.

        Raises NotImplementedError where `supports_broadcast` is False.
        """
        raise NotImplementedError(f"platform {self.name} makes no group of devices for weight sync")
