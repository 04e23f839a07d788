"""Convolutions between guards: exactly the bytes announced, and nothing beside them."""

import numpy as np

GUARD = 256
"""Bytes before and behind an array."""

ALIGNMENT = 64
"""Bytes that a workspace and an output are aligned to, as the device does it."""


class Fenced:
    """Bytes of 0xFF, which are NaNs as floats, between others that must stay so."""

    def __init__(self, nbytes):
        self._all = np.full(nbytes + 2 * GUARD + ALIGNMENT, 0xFF, np.uint8)
        start = GUARD + -(self._all.ctypes.data + GUARD) % ALIGNMENT
        self._before = self._all[:start]
        self._behind = self._all[start + nbytes :]
        self.inner = self._all[start : start + nbytes]

    def check(self, what):
        assert (self._before == 0xFF).all(), f"wrote before {what}"
        assert (self._behind == 0xFF).all(), f"wrote behind {what}"


def run_guarded(conv, problem, algo, a, b, before=None):
    """The result, computed in the exact workspace, which is poisoned.

    Args:
        conv: The library.
        problem: What to compute.
        algo: With which algorithm; a KeyError if the library does not list it.
        a: First operand, as stored; it must come back as it was.
        b: Second operand.
        before: What to add the result to; None to overwrite.
    """
    nbytes = dict(conv.algorithms(problem))[algo]

    def run(out, workspace, accumulate):
        conv.run(problem, algo, a, b, out, workspace, accumulate=accumulate)

    return _between_guards(run, problem, nbytes, a, b, before)


def run_kernel(kernel, workers, problem, a, b, before=None):
    """The same by a kernel, which no library has to list."""
    last = problem.layout == "NHWC"

    def run(out, workspace, accumulate):
        arrays = tuple(np.moveaxis(t, -1, 1) if last else t for t in (a, b, out))
        kernel.run(arrays, workspace, workers, accumulate)

    return _between_guards(run, problem, kernel.nbytes, a, b, before)


def _between_guards(run, problem, nbytes, a, b, before):
    spec = problem.operands()[2]
    workspace, result = Fenced(nbytes), Fenced(spec.nbytes)
    out = result.inner.view(spec.dtype).reshape(spec.shape)
    if before is not None:
        out[...] = before
    inputs = a.copy(), b.copy()
    run(out, workspace.inner, before is not None)
    workspace.check("the workspace")
    result.check("the output")
    assert (a == inputs[0]).all(), "wrote to the first operand"
    assert (b == inputs[1]).all(), "wrote to the second operand"
    return out
