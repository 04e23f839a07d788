"""The CPU backend with one algorithm more: PyTorch's own kernel, for NumPy arrays.

It joins ours in the tables of measurements, under a fingerprint that names PyTorch and
its threads, so that a plan takes it wherever ours are slower.
"""

import torch

from mucudnn.backends.base import Backend
from mucudnn.backends.cpu.conv import CpuConv
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.backends.cpu.kernels import bind
from mucudnn.backends.cpu.threads import Workers
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.conv.algorithm import ALGORITHM

__all__ = ["check_tuner", "cpu_backend"]

_NAME = "torch-cpu"


def cpu_backend(*, native: bool = True) -> Backend:
    """The CPU backend, for tuners that `convolutions` takes and for NumPy's arrays.

    Measurements are for as many threads as PyTorch has now (`torch.set_num_threads`).

    Args:
        native: Whether PyTorch's own kernel is one of the algorithms.
    """
    workers = Workers()
    conv = CpuConv(workers, [ALGORITHM] if native else [])
    threads = torch.get_num_threads()
    libraries = (f"torch-{torch.__version__}/{threads}-threads",) if native else ()
    return Backend(
        _NAME,
        CpuDevice(libraries),
        conv,
        binder=lambda plan, replay: conv.bind(plan),
        kernels=bind(workers),
    )


def check_tuner(tuner: Tuner) -> None:
    """Refuse a tuner that does not measure for PyTorch.

    Raises:
        TypeError: It is no tuner.
        ValueError: It has another backend.
    """
    if not isinstance(tuner, Tuner):
        raise TypeError(
            f"tuner must be a Tuner, got {type(tuner).__name__}; make it with "
            "Tuner(backend=mucudnn.torch.cpu_backend())"
        )
    if tuner.backend.name != _NAME:
        raise ValueError(
            f"tuner has backend {tuner.backend.name!r}; make it with "
            "Tuner(backend=mucudnn.torch.cpu_backend())"
        )
