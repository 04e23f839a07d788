"""A time limit holds on a clock that only kernels move."""

import time

import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.ir.numerics import RowStatus
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import compare
from mucudnn.suites import Layer
from tests.doubles import problem
from tests.examples import examples

RATES = {"FAST": 0.4, "SLOW": 1.0}  # ms a sample, of the null backend


def clocked(**options):
    """A tuner, and the seconds that its kernels took."""
    backend = get_backend("null")
    tuner = Tuner(backend=backend, cache=None, **options)
    return tuner, lambda: backend.device.now_ms / 1e3


@given(
    st.integers(1, 60_000),
    st.floats(0.01, 300),
    st.sampled_from(["powers_of_two", "undivided"]),
)
@examples(40)
def test_a_sweep_ends_in_time(batch, seconds, policy):
    tuner, now = clocked(batch_policy=policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", now)
        table = tuner.measure(problem(batch), time_limit_s=seconds)
    # What nothing is known of has to be tried: the smallest size, one run each.
    smallest = batch if policy == "undivided" else 1
    blind_s = sum(smallest * rate + 0.1 for rate in RATES.values()) / 1e3
    assert now() <= seconds + blind_s
    for row in table.perfs:
        if row.error is not None:
            assert row.status is RowStatus.LIMITED
            assert "time limit" in row.error


@given(st.lists(st.integers(1, 500), min_size=1, max_size=5), st.floats(0.01, 15))
@examples(25)
def test_a_comparison_ends_in_time(batches, seconds):
    tuner, now = clocked()
    layers = [Layer(f"{i}", problem(n), 1) for i, n in enumerate(batches)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", now)
        result = compare(tuner, layers, [1 << 20, 1 << 14], time_limit_s=seconds)
    assert now() <= seconds * 1.01 + 0.01
    assert len(result.layers) == len(layers)
    for layer in result.layers:
        for outcome in layer.outcomes:
            assert outcome.choice is not None or outcome.reason
