"""CUDA C++ compiled at run time by NVRTC, which torch's CUDA wheels bring along, kept on disk, launched by the driver.

A kernel here takes one argument, a `Params` whose fields are those of `struct Params` in its source, and runs on one
row of blocks. Nothing waits for the device except making a `Module`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HASH = hashlib.sha256().digest_size

FLOAT, INT32, INT64, POINTER = ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


def fields(kind: type[ctypes._SimpleCData] | type[ctypes.Array], names: str) -> list[tuple[str, Any]]:
    """Fields of a `Params`, of one kind."""
    return [(name, kind) for name in names.split()]


class Params(ctypes.Structure):
    """What a kernel is given. Keeps the tensors that it points to until its launches are queued, from where on the
    caching allocator orders the rest."""

    def __init__(self, **values: Tensor | Sequence[Tensor] | float | None) -> None:
        super().__init__()
        self._kept: list[Tensor] = []
        self.set(**values)

    def set(self, **values: Tensor | Sequence[Tensor] | float | None) -> None:
        """Set fields: tensors by their address, several as a list of addresses, None as a null pointer."""
        for name, value in values.items():
            if isinstance(value, Sequence):
                self._kept += value
                getattr(self, name)[: len(value)] = [tensor.data_ptr() for tensor in value]
            elif isinstance(value, Tensor):
                self._kept.append(value)
                setattr(self, name, value.data_ptr())
            else:
                setattr(self, name, value)


class Module:
    """The kernels of one source, compiled and loaded on one device.

    Raises OSError where NVRTC or the driver is missing, RuntimeError where one of them refuses, and AttributeError
    where it is too old for a function that is needed.
    """

    def __init__(self, source: Path, options: Sequence[str], device: int) -> None:
        """options: of NVRTC, such as "-DNAME=1". device: number of the CUDA device."""
        self.name, self.driver, self.device = source.name, _driver(), device
        self.context = ctypes.c_void_p()  # torch's: the runtime's primary context
        self._check(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device))
        self.properties = torch.cuda.get_device_properties(device)
        with torch.cuda.device(device):
            self._bind()
            image = compiled(source, architecture(self.properties.major, self.properties.minor), options)
            self.module = ctypes.c_void_p()
            self._check(self.driver.cuModuleLoadData(ctypes.byref(self.module), image))
        self.functions: dict[str, ctypes.c_void_p] = {}

    def function(self, name: str) -> ctypes.c_void_p:
        """The driver's handle of the kernel `name`."""
        if name not in self.functions:
            function = ctypes.c_void_p()
            self._bind()
            self._check(self.driver.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()))
            self.functions[name] = function
        return self.functions[name]

    def use_shared_memory(self, name: str, size: int) -> None:
        """Let kernel `name` take `size` bytes of dynamic shared memory, and prefer that to first-level cache."""
        self._check(self.driver.cuFuncSetAttribute(self.function(name), 8, size))  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._check(self.driver.cuFuncSetAttribute(self.function(name), 9, 100))  # PREFERRED_SHARED_MEMORY_CARVEOUT

    def blocks_at_once(self, name: str, threads: int, shared: int = 0) -> int:
        """Blocks of kernel `name` that the device runs at the same time."""
        count = ctypes.c_int()
        function = self.function(name)
        self._check(
            self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), function, threads, ctypes.c_size_t(shared)
            )
        )
        return count.value * self.properties.multi_processor_count

    def launch(self, name: str, blocks: int, threads: int, params: Params, shared: int = 0) -> None:
        """Queue kernel `name` on the device's current stream, if it has any blocks; it gets a copy of `params`. Raises
        RuntimeError where the driver refuses."""
        if not blocks:
            return
        with torch.cuda.device(self.device):
            self._bind()
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
            sizes = (blocks, 1, 1, threads, 1, 1, shared)
            self._check(self.driver.cuLaunchKernel(self.function(name), *sizes, stream, pointers, None))

    def _bind(self) -> None:
        """Make the context current in a thread that has none yet, as autograd's may."""
        current = ctypes.c_void_p()
        self._check(self.driver.cuCtxGetCurrent(ctypes.byref(current)))
        if not current.value:
            self._check(self.driver.cuCtxSetCurrent(self.context))

    def _check(self, status: int) -> None:
        if status:
            message = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(message))
            raise RuntimeError(f"{self.name}: CUDA error {status} ({(message.value or b'unknown').decode()})")


# Which devices


def obstacle(device: torch.device, capability: int = 8) -> str:
    """Why kernels that need this major compute capability cannot run on a device; "" where they can."""
    if device.type != "cuda":
        return "they need a CUDA device"
    if torch.version.hip is not None:
        return "they are CUDA and this is ROCm"
    properties = torch.cuda.get_device_properties(device)
    if properties.major < capability:
        return f"the device has compute capability {properties.major}.{properties.minor} and they need {capability}.0"
    return ""


def loads(load: Callable[[], object], consequence: str) -> bool:
    """Whether `load` makes a Module; where not, a warning gives the consequence and the reason."""
    try:
        load()
    except (OSError, RuntimeError, AttributeError) as problem:  # no library, it refuses, or it lacks a function
        warnings.warn(f"{consequence}: {problem}", stacklevel=3)
        return False
    return True


def number_of(device: torch.device) -> int:
    """The CUDA device's number; the current one's where it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def shared_memory(device: torch.device | int) -> int:
    """Bytes of shared memory that a block may have.

    HYBRID_SHARED_MEMORY=99 (KiB) in the environment lowers it, so that the forms for small devices can be tested.
    """
    limit, text = torch.cuda.get_device_properties(device).shared_memory_per_block_optin, "HYBRID_SHARED_MEMORY"
    chosen = os.environ.get(text) or limit // 1024
    try:
        return min(limit, int(chosen) * 1024)
    except ValueError:
        raise ValueError(f"{text} is {chosen!r}; it must be a whole number of KiB") from None


def architecture(major: int, minor: int) -> str:
    """Target of NVRTC; the "a" allows Hopper's own instructions.

    HYBRID_ARCHITECTURE=sm_90 in the environment chooses another, so that Hopper can test what all others run.
    """
    return os.environ.get("HYBRID_ARCHITECTURE") or ("sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}")


# Arguments


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it: contiguous, and beginning at a 16-byte boundary, as kernels read it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


# Compiling


def cache_folder() -> Path:
    """Where compiled kernels are kept: $HYBRID_KERNEL_CACHE, or hybrid-bert-kernels in the user's cache folder."""
    chosen = os.environ.get("HYBRID_KERNEL_CACHE")
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid-bert-kernels")


def compiled(source: Path, target: str, options: Sequence[str]) -> bytes:
    """Machine code of a source for one target, from the cache folder where it is there whole. Raises RuntimeError."""
    text = source.read_bytes()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [f"--gpu-architecture={target}", "-std=c++17", *options]
    key = hashlib.sha256(b"\0".join([text, f"{major.value}.{minor.value}".encode(), *(o.encode() for o in options)]))
    path = cache_folder() / f"{key.hexdigest()[:32]}.kernel"
    with contextlib.suppress(OSError):
        kept = path.read_bytes()  # the code behind its hash: a crash or a full disk may have left a part
        if hashlib.sha256(kept[_HASH:]).digest() == kept[:_HASH]:
            return kept[_HASH:]
    image = _compile(source, text, options)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds at each start and nothing else
        _keep(path, hashlib.sha256(image).digest() + image)
    return image


def _keep(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all; several processes may do this at once. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(number)
        os.replace(name, path)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _compile(source: Path, text: bytes, options: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    if status:
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise RuntimeError(f"NVRTC could not compile {source} (status {status}):\n{log.decode(errors='replace')}")
    image = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image


def _text(size_of: Callable[..., int], get: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


@cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of torch's CUDA version. Raises OSError where there is none."""
    version = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{version}"
    # torch's wheels bring NVRTC as a package beside torch; other builds find it as the system does.
    beside_torch = sorted(Path(torch.__file__).parent.parent.glob(f"nvidia/*/lib/{name}*"))
    for path in [name, *map(str, beside_torch)]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise OSError(f"{name} is neither beside torch nor on the system's library path")
