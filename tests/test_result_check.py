"""What an algorithm computes is compared with what others do, before it is timed."""

import math

import pytest

from mucudnn import Tuner
from mucudnn.ir.conv import Direction
from mucudnn.ir.numerics import NATIVE, TF32, Numerics, RowStatus
from mucudnn.runtime.store.measurements import BenchmarkCache
from tests.cuda_fake import fake_backend
from tests.cuda_work import everywhere, layer
from tests.cudnn_fake import FakeCudnn
from tests.doubles import QUICK


@pytest.fixture
def backend():
    return fake_backend(FakeCudnn())


def spoil(monkeypatch, backend, algo, change):
    """Have an algorithm change its result after it has computed it."""
    run = backend.conv.run

    def spoiled(problem, name, a, b, out, workspace, *, accumulate=False):
        before = out.host.copy()
        run(problem, name, a, b, out, workspace, accumulate=accumulate)
        if name == algo:
            out.host[...] = change(out.host, before, accumulate)

    monkeypatch.setattr(backend.conv, "run", spoiled)


def table_of(backend, problem, numerics="tf32", cache=None):
    options = {"numerics": numerics, "batch_policy": "undivided", "rule": QUICK}
    table = Tuner(backend=backend, cache=cache, **options).measure(problem)
    return {row.algo: row for row in table.perfs}


def nan_at_the_end(found, before, accumulate):
    found = found.copy()
    found.reshape(-1)[-1] = math.nan
    return found


WRONG = {
    "not written": lambda found, before, accumulate: before,
    "half too much": lambda found, before, accumulate: 1.5 * found,
    "not a number": nan_at_the_end,
}


@everywhere
@pytest.mark.parametrize("way", WRONG)
@pytest.mark.parametrize("algo", ["eng0", "eng1_k5=0", "eng2"])
def test_a_wrong_algorithm_has_no_time(direction, way, algo, backend, monkeypatch):
    spoil(monkeypatch, backend, algo, WRONG[way])
    rows = table_of(backend, layer(4, direction))
    assert rows[algo].error.startswith("wrong: its result differs from that of ")
    assert rows[algo].status is RowStatus.FAILED
    others = [row for name, row in rows.items() if name != algo]
    assert all(row.error is None for row in others if row.status is RowStatus.MEASURED)
    assert any(row.error is None for row in others)


def test_an_algorithm_that_adds_wrongly_has_no_time(backend, monkeypatch):
    def change(found, before, accumulate):
        return found - before if accumulate else found

    spoil(monkeypatch, backend, "eng2", change)
    for direction in (Direction.FORWARD, Direction.BACKWARD_FILTER):
        rows = table_of(backend, layer(4, direction))
        wrong = direction is Direction.BACKWARD_FILTER
        assert (rows["eng2"].error is not None) == wrong


def test_coarse_float32_is_tf32_whatever_the_library_says(backend, monkeypatch):
    def change(found, before, accumulate):
        return found * (1 + 2e-3)

    problem = layer(4)
    assert table_of(backend, problem)["eng0"].math_mode == NATIVE
    spoil(monkeypatch, backend, "eng0", change)
    cache = BenchmarkCache(None)
    row = table_of(backend, problem, cache=cache)["eng0"]
    assert (row.math_mode, row.error) == (TF32, None)
    refusal = Numerics(tf32=False).refusal
    for _ in range(2):  # measured, and from the cache
        row = table_of(backend, problem, "strict", cache)["eng0"]
        assert row.error == refusal(backend.conv.traits(problem, "eng1_k5=0"))
        assert math.isinf(row.time_ms)
