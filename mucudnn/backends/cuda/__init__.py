"""The NVIDIA GPU backend: CuPy for memory, streams and time, libcudnn 9 for kernels.

`cuda` is an installed GPU. `cuda:FILE` is a GPU that is only described, by the JSON
that cuDNN writes of a device: its engines and their workspaces can be listed, nothing
can run. `cuda:h200` uses a description in the package. CuPy and the library are
imported by `load`, not before.
"""

import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

from mucudnn.backends.base import Backend
from mucudnn.errors import BackendUnavailableError, MucudnnError

logger = logging.getLogger(__name__)
_COMPUTE_MODE = 20  # cudaDevAttrComputeMode
_EXCLUSIVE = 3  # cudaComputeModeExclusiveProcess
_DEVICES = "devices"
_OBTAINED = ("read_off_the_device", "by_hand")
"""Suffixes of shipped descriptions, by origin; the more reliable first."""


def described_devices() -> tuple[str, ...]:
    """Return the names of the descriptions in the package."""
    folder = files("mucudnn.backends.cuda") / _DEVICES
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(n.removesuffix(".json") for n in names if n.endswith(".json")))


def device_count(argument: str) -> int:
    """Return the number of installed GPUs; 1 if a description is named."""
    if argument:
        return 1
    cupy = _cupy()
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as e:
        raise BackendUnavailableError(_no_gpu(f"CUDA says {e}")) from e
    if count == 0:
        raise BackendUnavailableError(_no_gpu("CUDA sees none"))
    return count


def load(argument: str, device: int) -> Backend:
    """Return the backend of a GPU, or of the description of one."""
    return _described(argument) if argument else _present(device)


def _present(index: int) -> Backend:
    from mucudnn.backends.cuda.conv import CudaConv, CudaEpilogues, CudaPlan
    from mucudnn.backends.cuda.conv.graph_api import ALIGNMENT
    from mucudnn.backends.cuda.cudnn_kernels import CudnnKernels
    from mucudnn.backends.cuda.descriptors import LiveSession
    from mucudnn.backends.cuda.device import CudaDevice
    from mucudnn.backends.cuda.kernels import bind
    from mucudnn.backends.cuda.kernels.launch import CupyLauncher
    from mucudnn.backends.cuda.libcudnn import Cudnn
    from mucudnn.backends.cuda.loading import load_library
    from mucudnn.backends.cuda.mapped_memory import CudaMapper

    library = load_library(without_driver=False)
    _cupy().cuda.Device(index).use()
    # A handle at once: a driver that is too old fails here, not at a kernel.
    device = CudaDevice(index, library.version)
    session = LiveSession(Cudnn(library.cdll), device.stream)
    try:
        session.handle()
    except MucudnnError as e:
        raise BackendUnavailableError(
            f"cuDNN from {library.path} cannot use GPU {index}: {e}"
        ) from e
    conv, own = CudaConv(session), CudnnKernels(session)
    return Backend(
        "cuda",
        device,
        conv,
        binder=lambda plan, replay: CudaPlan(
            conv, plan, device.capture if replay else None
        ),
        index=index,
        split_alignment=ALIGNMENT,
        may_crash=_may_be_shared(_cupy(), index),
        epilogues=CudaEpilogues(conv),
        plan_serializer=conv,
        mapper=CudaMapper(index, device.stream),
        kernels=own.beside(bind(CupyLauncher(device.stream))),
        library_kernels=own,
        capture=device.capture,
        step_io=device.step_io,
    )


def _may_be_shared(cupy: Any, index: int) -> bool:
    """Return whether a second process may use the GPU, to time kernels in it."""
    mode: int = cupy.cuda.runtime.deviceGetAttribute(_COMPUTE_MODE, index)
    if mode == _EXCLUSIVE:
        logger.warning(
            "GPU %d is in exclusive-process mode, so algorithms are timed in this "
            "process, and a crash of one ends it; nvidia-smi -c DEFAULT allows "
            "separate processes",
            index,
        )
    return mode != _EXCLUSIVE


def _described(argument: str) -> Backend:
    from mucudnn.backends.cuda.conv import CudaConv
    from mucudnn.backends.cuda.conv.graph_api import ALIGNMENT
    from mucudnn.backends.cuda.descriptors import DescribedSession
    from mucudnn.backends.cuda.device import DescribedDevice
    from mucudnn.backends.cuda.libcudnn import Cudnn
    from mucudnn.backends.cuda.loading import load_library

    text = _description(argument)
    library = load_library(without_driver=True)
    session = DescribedSession(Cudnn(library.cdll), text)
    try:
        device = DescribedDevice(text, library.version)
    except (ValueError, KeyError, TypeError) as e:
        raise BackendUnavailableError(f"{argument} is not a device description") from e
    conv = CudaConv(session, absent=f"{device.name} is only described, not here")
    return Backend(f"cuda:{argument}", device, conv, split_alignment=ALIGNMENT)


def _description(argument: str) -> str:
    shipped = described_devices()
    for name in (argument, *(f"{argument}_{how}" for how in _OBTAINED)):
        if name in shipped:
            entry = files("mucudnn.backends.cuda") / _DEVICES / f"{name}.json"
            return entry.read_text()
    try:
        return Path(argument).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as e:
        if argument.isdecimal():
            raise BackendUnavailableError(
                f"'cuda:{argument}' does not name GPU {argument}: the colon precedes a "
                f"description; set CUDA_VISIBLE_DEVICES={argument}, and use 'cuda'"
            ) from e
        raise BackendUnavailableError(
            f"device description {argument!r} cannot be read ({e}); name a file that "
            f"cuDNN wrote, or one of: {', '.join(shipped)}"
        ) from e


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as e:
        raise BackendUnavailableError(
            "backend 'cuda' needs CuPy, which is not installed: "
            "pip install '.[cuda13]' (or [cuda12] for a CUDA 12 driver)"
        ) from e
    return cupy


def _no_gpu(reason: str) -> str:
    return (
        f"no NVIDIA GPU can be used here: {reason}; the backend 'cpu' computes "
        "anywhere, and `mucudnn tune … --backend cuda --device h200 --plan-only` "
        "lists what a GPU would have"
    )
