"""Tensors of the device `npu`: wrappers that compute on tensors in host memory, and count waits for the device.

    torch.zeros(3, device="npu")  --dispatch key PrivateUse1--> run_operator --> OnDevice(host tensor)
    OnDevice + OnDevice           --OnDevice.__torch_dispatch__--> run_operator --> OnDevice
    OnDevice.item(), .to("cpu")   the same, and one is added to `waits`

An operator refuses tensors of the host beside tensors of the device, as a real device does; numbers (0-d) may be mixed.
"""

import collections
import sys
import traceback
from pathlib import Path

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

import hone

NAME = "npu"
HONE = f"{Path(hone.__file__).parent}/"
aten = torch.ops.aten
waits: collections.Counter[str] = collections.Counter()  # "kind file:line" -> how often the host waited for the device
COPIES = (aten.copy_.default,)
SIZED_BY_VALUES = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
)


class OnDevice(torch.Tensor):
    """A tensor of the device; `host` holds its values."""

    __slots__ = ["host"]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host, requires_grad=False):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not torch.is_inference_mode_enabled():
            return run_operator(func, *args, **(kwargs or {}))
        with torch.inference_mode(False), torch.no_grad():  # a wrapper may not be an inference tensor
            return run_operator(func, *args, **(kwargs or {}))

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other):
        """torch replaces dtype, shape and strides only; the values are ours to replace."""
        torch.Tensor.data.__set__(self, other)
        self.host = other.host

    def tolist(self):
        count("tolist")
        return self.host.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy")

    def data_ptr(self):
        return self.host.data_ptr()

    def __repr__(self):
        return f"OnDevice({self.host!r})"

    def __reduce_ex__(self, protocol):
        raise TypeError("a tensor of a device was pickled")


def count(kind):
    """Add a wait, under the line of hone that caused it."""
    frames = [frame for frame in traceback.extract_stack(sys._getframe(1)) if frame.filename.startswith(HONE)]
    place = f"{frames[-1].filename.removeprefix(HONE)}:{frames[-1].lineno}" if frames else "elsewhere"
    waits[f"{kind} {place}"] += 1


def run_operator(func, *args, **kwargs):
    """Compute an operator on the hosts' tensors; the results are on the device if an argument or `device` is."""
    given = tree_flatten((args, kwargs))[0]
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    ours = [one for one in tensors if isinstance(one, OnDevice)]
    named = [one for one in given if isinstance(one, torch.device)]
    moves = bool(named) or func in COPIES
    if not moves:
        _refuse_strangers(func, tensors, ours)
    to_device = named[0].type == NAME if named else bool(ours)
    if func is aten._local_scalar_dense.default:
        count("item")
    elif func in SIZED_BY_VALUES and ours:
        count(str(func))
    elif ours and moves and not (to_device if named else isinstance(args[0], OnDevice)):
        count("copy to the host")
    kwargs.pop("pin_memory", None)
    if "non_blocking" in kwargs:
        kwargs["non_blocking"] = False
    found = func(*tree_map(_host, args), **tree_map(_host, kwargs))
    if not to_device:
        return found
    wrapped = tree_map(lambda one: OnDevice(one) if isinstance(one, torch.Tensor) else one, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _refuse_strangers(func, tensors, ours):
    strangers = [one for one in tensors if not isinstance(one, OnDevice) and one.dim() > 0]
    if strangers and ours:
        shape = tuple(strangers[0].shape)
        raise RuntimeError(f"{func}: expected all tensors on {NAME}:0, found a host tensor of shape {shape}")


def _host(value):
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.host if isinstance(value, OnDevice) else value
