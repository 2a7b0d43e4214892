"""Lets fake tensors on "cuda" take part in autograd on a machine without a GPU.

FakeTensorMode gives a CUDA build a device guard that does nothing. A CPU build has no guard that could be replaced: it
gets one here, which is tied to torch's version. The engine of both asks CUDA's hooks before it runs a backward pass on
"cuda"; they answer here as on a machine with a GPU. Both are copies of C++ vtables, in this process only.
"""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import torch

TORCH = "2.13.0"
_CUDA, _META = 1, 14  # c10::DeviceType
_ROOT = Path(torch.__file__).parent
_kept: list[object] = []  # what C++ points to
_is_done = False

Table = ctypes.Array[ctypes.c_void_p]


def why_not() -> str:
    """Why this build cannot be made to believe in a GPU; empty if it can."""
    if torch.cuda.is_available():
        return "there is a GPU"
    found = torch.__version__.split("+")[0]
    is_known = torch.version.cuda is not None or found == TORCH
    return "" if is_known else f"a CPU build of torch {found}; written for the C++ interfaces of {TORCH}"


def pretend() -> None:
    """Makes torch take "cuda" for a device of this machine that has no streams and no kernels. Again: does nothing."""
    global _is_done
    if _is_done:
        return
    _is_done = True
    if torch.version.cuda is None:
        _make_guard()
    _make_hooks()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")


def _make_guard() -> None:
    c10 = ctypes.CDLL(str(_ROOT / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 22).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guard = ctypes.cast(guards[_META], ctypes.POINTER(ctypes.c_void_p))
    slots = [*_virtuals("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface"), "~", "~"]
    table = _copied(guard, len(slots))
    count = ctypes.CFUNCTYPE(ctypes.c_byte, ctypes.c_void_p)(lambda _: 0)  # none: torch then takes its empty guard
    table[slots.index("deviceCount")] = ctypes.cast(count, ctypes.c_void_p).value
    empty = ctypes.c_void_p(ctypes.addressof(table))
    _kept.extend((count, empty))
    guards[_CUDA] = ctypes.addressof(empty)
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    assert guards[_CUDA] != ctypes.addressof(empty), "torch did not take its empty guard"


def _make_hooks() -> None:
    """at::hasCUDA() is a virtual call. `current_device` takes as many arguments and returns -1, which is true."""
    cpu = ctypes.CDLL(str(_ROOT / "lib" / "libtorch_cpu.so"))
    get_hooks: Callable[[], int] = cpu._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p  # type: ignore[attr-defined]
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    base = _virtuals("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface")
    own = _virtuals("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface")
    slots = ["~", "~", *base, *(name for name in own if name not in base)]
    table = _copied(hooks, len(slots))
    for name in ("hasCUDA", "isBuilt", "hasPrimaryContext"):
        table[slots.index(name)] = table[slots.index("current_device")]
    hooks[0] = ctypes.addressof(table)


def _virtuals(header: str, struct: str) -> list[str]:
    """The virtual functions of a C++ struct in the order of their declaration, without the destructor."""
    text = (_ROOT / "include" / header).read_text()
    body = text[re.search(rf"struct \w+ {struct}\b", text).start() :].split("\n};")[0]  # type: ignore[union-attr]
    return re.findall(r"^\s*virtual\s+[\w:<>,\s&*]*?[\s&*](\w+)\s*\(", body, re.M)


def _copied(place: "ctypes._Pointer[ctypes.c_void_p]", size: int) -> Table:
    """A copy of the vtable that an object begins with."""
    table = (ctypes.c_void_p * size).from_buffer_copy((ctypes.c_void_p * size).from_address(place[0] or 0))
    _kept.append(table)
    return table
