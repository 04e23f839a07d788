"""Inputs and results of steps on their way, over streams that run as late as they may.

What computes is queued, too, so that whoever does not wait reads what was there before.
"""

from functools import cache, partial

import numpy as np
import pytest

from mucudnn.backends.cuda.copies import CudaCopier, CudaStepIO
from mucudnn.errors import BackendError
from mucudnn.ir.optimizers import DynamicLossScale
from mucudnn.ir.schedule import SwapOut
from mucudnn.runtime.training.budget import MemoryBudget
from tests.cuda_emulator import COMPILER
from tests.cupy_fake import CUDARuntimeError, StrictArray, StrictCupy
from tests.test_cuda_training import STEPS, stand_in
from tests.training_cases import examples, trainer

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


@pytest.fixture(
    params=[(lazy, staged) for lazy in (False, True) for staged in (True, False)],
    ids=lambda p: f"copies {'late' if p[0] else 'early'}{', staged' * p[1]}",
)
def device(request):
    """CuPy's stand-in that computes late, and a step_io on it."""
    lazy, staged = request.param
    cupy = StrictCupy(lazy=lazy)
    cupy.current._lazy = True
    return cupy, CudaStepIO(cupy, 0, lambda: cupy.current.ptr, staged=staged)


def values(number):
    return np.full((3, 2), number, np.float32)


def test_every_step_reads_its_own_input(device):
    """However far the host is ahead, and whatever it does with its array afterwards."""
    cupy, step_io = device
    target, read = cupy.empty(24, "uint8").view("float32").reshape(3, 2), []
    source = values(0)
    for number in range(6):
        source[...] = number
        step_io.upload(source, target)
        cupy.current.put(lambda: read.append(target.host.copy()))
    source[...] = 99
    cupy.current.synchronize()
    assert [set(found.flat) for found in read] == [{float(n)} for n in range(6)]


def test_results_are_those_of_their_step_whenever_they_are_read(device):
    cupy, step_io = device
    source = StrictArray(values(0))
    found = []
    for number in range(5):
        cupy.current.put(lambda n=number: source.host.fill(n))
        found.append(step_io.download(source))
    cupy.current.put(lambda: source.host.fill(99))
    assert [set(result().flat) for result in found] == [{float(n)} for n in range(5)]
    assert all(result.ready for result in found)
    again = found[0]()
    assert again is found[0]()


def test_nothing_is_waited_for_before_it_is_read(device):
    cupy, step_io = device
    source, target = StrictArray(values(0)), StrictArray(values(0))
    cupy.current.put(lambda: source.host.fill(1))
    step_io.upload(values(2), target)
    result = step_io.download(source)
    assert not result.ready
    assert cupy.current.queue
    assert (result() == 1).all()
    assert result.ready


def test_closing_leaves_results_readable(device):
    _, step_io = device
    source = StrictArray(values(3))
    result = step_io.download(source)
    step_io.close()
    assert (result() == 3).all()


def test_what_cuda_refuses_is_our_error(device, monkeypatch):
    cupy, step_io = device

    def fails(*_):
        raise CUDARuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", fails)
    with pytest.raises(BackendError, match="24 bytes to the device failed"):
        step_io.upload(values(1), StrictArray(values(0)))
    with pytest.raises(BackendError, match="to the host failed"):
        step_io.download(StrictArray(values(0)))


def test_without_a_place_on_the_device_an_input_takes_none(monkeypatch):
    cupy = StrictCupy()
    target = StrictArray(values(0))
    step_io = CudaStepIO(cupy, 0, lambda: cupy.current.ptr, staged=False)
    monkeypatch.setattr(cupy, "empty", None)
    step_io.upload(values(1), target)
    assert (target.host == 1).all()


def trained(monkeypatch, *, late, **more):
    """A trainer, its losses and states, and whose copies the host has waited for."""
    images, labels = examples(6 * STEPS)
    rows = [slice(6 * i, 6 * i + 6) for i in range(STEPS)]
    waits, results, finish = [], [], CudaCopier.finish
    _, gpu = stand_in(monkeypatch, lazy=True)
    made = trainer(6, backend=gpu, evaluate=False, **more)
    with monkeypatch.context() as patch:
        patch.setattr(
            CudaCopier, "finish", lambda copier: (waits.append(copier), finish(copier))
        )
        for number, part in enumerate(rows):
            if number == 1:
                waits.clear()  # what is live across steps was fetched once
            results.append(made.step(images[part], labels[part]))
            if not late:
                assert np.isfinite(results[-1].loss)
    state = made.state.save()  # before anybody has read a late loss
    return made, [(r.loss, r.correct) for r in results], state, waits


@cache
def trained_in_all_memory(**more):
    with pytest.MonkeyPatch.context() as patch:
        made, found, state, _ = trained(patch, late=False, **more)
    return made.peak_bytes, found, state


def no_wait_within(monkeypatch, share, budget=MemoryBudget, **more):
    """Train in a share of the memory; all bits are those of training in all of it."""
    peak_bytes, expected, state = trained_in_all_memory(**more)
    more["budget"] = budget(nbytes=int(peak_bytes * share), convolutions="fixed")
    made, found, after, waits = trained(monkeypatch, late=True, **more)
    assert not waits
    assert made.peak_bytes <= more["budget"].nbytes
    copied = [i for i in made.placed.schedule.instructions if type(i) is SwapOut]
    assert bool(copied) == (share < 1)
    assert found == expected
    assert all(np.array_equal(v, after[n]) for n, v in state.items())
    return made


@emulated
@pytest.mark.parametrize("precision", [None, "float16"])
@pytest.mark.parametrize("share", [0.7, 1.5])
def test_within_a_budget_the_host_waits_for_no_step(share, precision, monkeypatch):
    """Copies of what left are waited for by the stream that computes."""
    no_wait_within(monkeypatch, share, precision=precision)


@emulated
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the stand-in
def test_the_host_decides_nothing_where_updates_may_be_skipped(monkeypatch):
    """The first steps overflow: the device lowers its scale and updates nothing."""
    scaling = DynamicLossScale(2.0**30, backoff=2.0**-10)
    more = {"precision": "float16", "loss_scale": scaling}
    made = no_wait_within(monkeypatch, 0.8, **more)
    assert made.loss_scale == 2.0**10


@emulated
@pytest.mark.parametrize("away", ["disk", "peer:1"])
def test_wherever_it_goes_the_host_waits_for_no_step(away, monkeypatch, tmp_path):
    """But within a copy to memory that is not page-locked, as CUDA does."""
    tiers = f"disk:{tmp_path}" if away == "disk" else away
    budget = partial(MemoryBudget, tiers=tiers)
    no_wait_within(monkeypatch, 0.8, budget, precision=None)


@emulated
@pytest.mark.parametrize("parts", [1, 3])
def test_losses_read_late_are_those_read_at_once(parts, monkeypatch):
    """A step is launched while the loss of the one before has not been read."""
    _, early, *_ = trained(monkeypatch, late=False, parts=parts)
    made, late, *_ = trained(monkeypatch, late=True, parts=parts)
    assert late == early
    assert made.step_ms > 0
