"""Memory, time and streams of one GPU by CuPy; peers; and described GPUs."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from mucudnn.backends.cuda.copies import CudaCopier, CudaStepIO, pinned
from mucudnn.backends.cuda.kernels.launch import Program
from mucudnn.backends.cuda.loading import release_text, with_install_hints
from mucudnn.backends.device import Copier, Device, Slab
from mucudnn.errors import (
    BackendError,
    BackendUnavailableError,
    OutOfMemoryError,
    UnsupportedError,
)
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.plugins import installed_version

_RANDOM_SLICE = 1 << 20
_LOADED_LATE = 256 << 20  # reserve for kernel modules; assumed, not measured
_SPIN_NS = 40_000  # delay of a timed kernel, in which the host launches it


class Queue:
    """A stream, as the key of its workspace."""


class CudaDevice:
    """A GPU whose kernels and copies go to CuPy's current stream."""

    def __init__(self, index: int, cudnn: int) -> None:
        import cupy

        self._cupy = cupy
        self._index = index
        self._cudnn = cudnn
        self._queues: dict[int, Queue] = {}
        self._properties: dict[str, Any] = cupy.cuda.runtime.getDeviceProperties(index)
        self._name: str = self._properties["name"].decode()

    @functools.cached_property
    def fingerprint(self) -> str:
        """GPU, architecture, cuDNN and our version, on which measurements depend."""
        p = self._properties
        arch = f"sm_{p['major']}{p['minor']}"
        cudnn = f"cudnn-{release_text(self._cudnn)}"
        return "/".join(
            ["cuda", self._name, arch, cudnn, f"mucudnn-{installed_version()}"]
        )

    def description(self) -> Mapping[str, str]:
        """Return GPU, driver, libraries, memory and clocks."""
        runtime, p = self._cupy.cuda.runtime, self._properties
        return {
            "gpu": self._name,
            "compute capability": f"{p['major']}.{p['minor']}",
            "multiprocessors": str(p.get("multiProcessorCount", "?")),
            "memory": f"{p.get('totalGlobalMem', '?')} bytes",
            "core clock": f"{p.get('clockRate', 0) / 1e3:.0f} MHz",
            "memory clock": f"{p.get('memoryClockRate', 0) / 1e3:.0f} MHz",
            "driver": _cuda_version(runtime.driverGetVersion()),
            "runtime": _cuda_version(runtime.runtimeGetVersion()),
            "cudnn": release_text(self._cudnn),
            "cupy": self._cupy.__version__,
        }

    def allocate(self, nbytes: int) -> Any:
        """Return bytes from CuPy's pool, aligned to 512."""
        with self._room_for(f"{nbytes} bytes"):
            return self._cupy.empty(nbytes, "uint8")

    def trim(self) -> None:
        """Free unused memory of CuPy's pool, for other processes."""
        with self._cupy.cuda.Device(self._index):
            self._cupy.get_default_memory_pool().free_all_blocks()

    def available_bytes(self) -> int:
        """Return free memory with CuPy's pool, minus a reserve for kernel modules.

        cuBLAS's workspace and cuDNN's handle are allocated before the reading. Kernel
        modules are loaded at their first launch: `_LOADED_LATE` is reserved for them.
        """
        self.stream()
        with (
            self._room_for("cuBLAS's workspace"),
            with_install_hints("asking for free memory"),
        ):
            one = self._cupy.empty(4, "uint8").view("float32").reshape(1, 1)
            self._cupy.matmul(one, one, out=one)
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            spare = self._cupy.get_default_memory_pool().free_bytes()
        return max(0, int(free) + int(spare) - _LOADED_LATE)

    def view(self, buffer: Any, offset: int, spec: TensorSpec) -> Any:
        """Return a CuPy view; bfloat16 is of `ml_dtypes`' type."""
        window = buffer[offset : offset + spec.nbytes]
        return window.view(_dtype(spec.dtype)).reshape(spec.shape)

    def dense(self, array: Any, *, copy: bool = False) -> Any:
        """Return a C-contiguous array."""
        packed = array.flags.c_contiguous
        if packed and not copy:
            return array
        with (
            self._room_for(f"a packed copy of {array.nbytes} bytes"),
            with_install_hints("packing"),
        ):
            return array.copy() if packed else self._cupy.ascontiguousarray(array)

    def overlap(self, one: Any, other: Any) -> bool:
        """Compare addresses, which are unique among all devices."""
        first, second = one.data.ptr, other.data.ptr
        found: bool = first < second + other.nbytes and second < first + one.nbytes
        return found

    def randomize(self, array: Any) -> None:
        """Fill with uniform numbers in [-1, 1), in slices to save memory."""
        flat = array.reshape(-1)
        with (
            self._room_for("random numbers"),
            with_install_hints("drawing random numbers"),
        ):
            rng = self._cupy.random.default_rng(0)
            for start in range(0, flat.size, _RANDOM_SLICE):
                part = flat[start : start + _RANDOM_SLICE]
                values = rng.random(part.size, dtype="float32") * 2 - 1
                part[...] = values

    def upload(self, source: Any, target: Any) -> None:
        """Copy from the host and wait, which CuPy does not for pinned memory."""
        target.set(source)
        self._cupy.cuda.get_current_stream(self._index).synchronize()

    def download(self, source: Any) -> Any:
        """Copy to the host and wait."""
        return self._cupy.asnumpy(source)

    def queue(self) -> Queue:
        """Return the current stream."""
        return self._queues.setdefault(self.stream(), Queue())

    def stream(self) -> int:
        """Return the address of the current stream; make this the thread's device.

        A new thread is on device 0, whatever the device of the thread that started it.
        """
        if self._cupy.cuda.runtime.getDevice() != self._index:
            self._cupy.cuda.Device(self._index).use()
        address: int = self._cupy.cuda.get_current_stream(self._index).ptr
        return address

    def begin(self, launches: int = 1) -> Any:
        """Record an event after a delay on the device, which hides launch times."""
        self.stream()
        with with_install_hints("timing"):
            self._spin((1,), (1,), (_SPIN_NS * launches,))
        return self.record()

    def record(self) -> Any:
        """Record an event on the current stream."""
        self.stream()
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Return the time between two events, waiting for the second."""
        stop.synchronize()
        elapsed: float = self._cupy.cuda.get_elapsed_time(start, stop)
        return elapsed

    def host(self, nbytes: int) -> Any:
        """Return page-locked memory as a NumPy array of bytes."""
        with self._cupy.cuda.Device(self._index):
            return pinned(self._cupy, nbytes)

    def copier(self) -> CudaCopier:
        """Return two copy streams beside the compute stream."""
        return CudaCopier(self._cupy, self._index, self.stream)

    def step_io(self, staged: bool) -> CudaStepIO:
        """Return a stream for inputs, staged in device memory if `staged`."""
        return CudaStepIO(self._cupy, self._index, self.stream, staged=staged)

    def peer(self, index: int, nbytes: int) -> "PeerMemory":
        """Return memory of another GPU, reached by peer copies."""
        return PeerMemory(self._cupy, self._index, index, nbytes, self.stream)

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Capture all launches of `launch` as a graph, or launch nothing on failure."""
        stream = self._cupy.cuda.Stream(non_blocking=True)
        try:
            with stream:
                stream.begin_capture()
                try:
                    launch()
                finally:
                    graph = stream.end_capture()
        except self._cupy.cuda.runtime.CUDARuntimeError as e:
            raise BackendError(f"these calls cannot be captured: {e}") from e
        current = self._cupy.cuda.get_current_stream

        def replay() -> None:
            self.stream()
            graph.launch(stream=current())

        return replay

    @contextlib.contextmanager
    def _room_for(self, what: str) -> Iterator[None]:
        """Switch to this device and convert out-of-memory errors."""
        try:
            with self._cupy.cuda.Device(self._index):
                yield
        except self._cupy.cuda.memory.OutOfMemoryError as e:
            raise OutOfMemoryError(f"no room for {what}: {e}") from e

    @functools.cached_property
    def _spin(self) -> Any:
        return self._cupy.RawKernel(Program.load("spin.cu").text, "spin")


class DescribedDevice:
    """A GPU that is only described, by cuDNN's JSON, without memory and clock."""

    def __init__(self, text: str, cudnn: int) -> None:
        self._fields: dict[str, Any] = json.loads(text)
        self.name = str(self._fields["deviceName"])
        self._cudnn = cudnn

    @property
    def fingerprint(self) -> str:
        """Name of the GPU, marked as described, and the version of cuDNN."""
        return f"cuda/{self.name} (described)/cudnn-{release_text(self._cudnn)}"

    def description(self) -> Mapping[str, str]:
        """Return the fields of the description."""
        return {name: str(value) for name, value in self._fields.items()}

    def trim(self) -> None:
        """Do nothing: no memory is held."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise BackendUnavailableError for everything that needs the device."""
        raise BackendUnavailableError(
            f"{self.name} is a description without a device: engines and workspaces "
            "can be listed (--plan-only), but nothing can run"
        )

    available_bytes = allocate = view = dense = randomize = upload = download = _refuse
    overlap = queue = begin = record = elapsed_ms = host = copier = peer = _refuse


def _dtype(name: str) -> Any:
    if name != "bfloat16":
        return name
    try:
        from ml_dtypes import bfloat16
    except ImportError as e:
        raise UnsupportedError(
            "bfloat16 needs ml_dtypes, which is not installed: pip install ml_dtypes "
            "(it comes with '.[cuda13]' and '.[cuda12]')"
        ) from e
    return bfloat16


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


# Memory of another GPU as an offload target.
#
# Copies between GPUs bypass the host if the two can access each other; otherwise the
# driver stages them. This has not run on two GPUs yet.


class PeerMemory(Slab):
    """A slab of memory on GPU `peer` for computing GPU `index`; see `Device.peer`."""

    def __init__(
        self, cupy: Any, index: int, peer: int, nbytes: int, compute: Callable[[], int]
    ) -> None:
        runtime = cupy.cuda.runtime
        count = runtime.getDeviceCount()
        if peer == index or not 0 <= peer < count:
            raise ValueError(
                f"peer:{peer} is not another GPU: this is number {index} of {count}"
            )
        self._cupy, self._index, self._compute = cupy, index, compute
        with cupy.cuda.Device(index), suppress(runtime.CUDARuntimeError):
            if runtime.deviceCanAccessPeer(index, peer):
                runtime.deviceEnablePeerAccess(peer)  # fails if already enabled
        try:
            with cupy.cuda.Device(peer):
                slab = cupy.empty(nbytes, "uint8")
        except cupy.cuda.memory.OutOfMemoryError as e:
            raise OutOfMemoryError(
                f"no room for {format_bytes(nbytes)} on peer:{peer}: {e}"
            ) from e
        super().__init__(f"peer:{peer}", slab, nbytes)

    def copier(self, device: Device) -> Copier:
        """Return two copy streams of the computing GPU."""
        return CudaCopier(self._cupy, self._index, self._compute, peer=True)
