"""The NumPy backend: runs everywhere; the reference for the tests of the others.

NumPy is imported by `load`, not before, so that a program can still choose its BLAS
kernels (`blas.prefer_wide_vectors`) after importing this package.
"""

from mucudnn.backends.base import Backend


def device_count(argument: str) -> int:
    """Return 1: all cores together are one device."""
    if argument:
        raise ValueError(f"backend 'cpu' takes no argument, got {argument!r}")
    return 1


def load(argument: str, device: int) -> Backend:
    """Return the CPU backend."""
    from mucudnn.backends.cpu.conv import CpuConv
    from mucudnn.backends.cpu.device import CpuDevice
    from mucudnn.backends.cpu.kernels import bind
    from mucudnn.backends.cpu.mapped_memory import CpuMapper
    from mucudnn.backends.cpu.threads import Workers

    workers = Workers()
    memory = CpuDevice()
    conv = CpuConv(workers)
    return Backend(
        "cpu",
        memory,
        conv,
        binder=lambda plan, replay: conv.bind(plan),
        mapper=CpuMapper(memory.available_bytes),
        kernels=bind(workers),
    )
