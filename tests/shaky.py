"""A machine whose kernels take another time at every run, in the same order always."""

import random

from mucudnn.backends import Backend
from mucudnn.backends.null import NullConv
from mucudnn.backends.virtual import VirtualDevice

ALGORITHMS = ("DIRECT", "FFT", "GEMM", "WINOGRAD")


class ShakyConv(NullConv):
    """Speeds and workspaces out of a seed; kernels are slower right after others.

    What single kernels promise, a division of them may not keep.
    """

    def __init__(self, device, seed, jitter):
        super().__init__(device)
        self._device = device
        self._seed = seed
        self._jitter = jitter
        self._runs = random.Random(seed)
        self._idle_at = -1.0

    def _of(self, *what):
        return random.Random(repr((self._seed, *what)))

    def algorithms(self, problem):
        return [
            (algo, 256 * i * problem.batch * self._of(algo).choice([1, 4, 9]))
            for i, algo in enumerate(ALGORITHMS)
        ]

    def run(self, problem, algo, a, b, out, workspace, *, accumulate=False):
        fixed = self._of(algo, problem.w_shape, problem.batch)
        ms = 0.05 + 0.1 * problem.batch * fixed.uniform(0.5, 1.5)
        ms *= 1 + self._runs.uniform(-self._jitter, self._jitter)
        if self._device.now_ms == self._idle_at:
            ms *= self._of("after").choice([1.0, 1.1, 1.5])
        self._device.advance(ms)
        self._idle_at = self._device.now_ms


class ShakyDevice(VirtualDevice):
    """Some time passes between two things that are timed."""

    def begin(self, launches=1):
        self.advance(0.125)
        return super().begin(launches)


def shaky(seed, *, jitter=0.1, alignment=1):
    device = ShakyDevice(f"shaky {seed}")
    conv = ShakyConv(device, seed, jitter)
    return Backend("shaky", device, conv, split_alignment=alignment)
