"""A row's status is decided once, from a text that files have carried all along."""

import dataclasses
import math

import pytest
from hypothesis import given, strategies as st

from mucudnn.codecs import decode_perf, perf_to_dict
from mucudnn.errors import OutOfMemoryError, UnsupportedError
from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.numerics import NUMERICS, Numerics, RowStatus, Traits
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK, problem, watched


def row(error, samples=0):
    return AlgoPerf(
        algo="A", batch=8, time_ms=math.inf, workspace=0, error=error, samples=samples
    )


WRITTEN = {
    "not measured: the time limit was reached": RowStatus.LIMITED,
    "not measured: out of memory: x": RowStatus.LIMITED,
    "not accepted: it rounds float32 to TF32": RowStatus.REFUSED,
    "UnsupportedError: stride 2": RowStatus.UNSUPPORTED,
    "BackendError: CUDNN_STATUS_EXECUTION_FAILED": RowStatus.FAILED,
    "the measuring process ended by SIGSEGV while running it": RowStatus.FAILED,
    "": RowStatus.FAILED,
}
"""Texts of files that are out there; they must go on to mean what they meant."""


@pytest.mark.parametrize(("text", "status"), WRITTEN.items())
def test_texts_of_older_files_have_their_status(text, status):
    assert row(text).status is status
    data = perf_to_dict(row(text))
    assert "status" not in data
    assert decode_perf("perf", data) == row(text)
    assert decode_perf("perf", data).status is status
    with BenchmarkCache() as cache:
        cache.put("gpu", problem(), [row(text)])
        assert [perf.status for perf in cache.get("gpu", problem())] == [status]


@given(st.sampled_from(RowStatus), st.text(max_size=20))
def test_what_a_status_writes_is_read_as_that_status(status, reason):
    if status is RowStatus.MEASURED:
        assert RowStatus.of(None) is status
        return
    text = status.text(reason)
    assert status.reason(text) == reason
    if status is not RowStatus.FAILED:
        assert RowStatus.of(text) is status


def test_a_time_of_a_cold_run_is_no_measurement():
    cold = AlgoPerf(algo="A", batch=1, time_ms=1.0, workspace=0, samples=0)
    assert cold.status is RowStatus.LIMITED
    warm = dataclasses.replace(cold, samples=1)
    assert warm.status is RowStatus.MEASURED


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnsupportedError("not accepted: or so it says"), RowStatus.UNSUPPORTED),
        (RuntimeError("not measured: or so it says"), RowStatus.FAILED),
        (OutOfMemoryError("full"), RowStatus.LIMITED),
    ],
)
def test_rows_get_the_status_of_what_happened(error, status):
    def fail(problem, algo):
        raise error

    table = Tuner(backend=watched(before=fail), rule=QUICK).measure(problem())
    assert {perf.status for perf in table.perfs} == {status}


@pytest.mark.parametrize("word", ["strict", "deterministic"])
def test_every_refusal_is_one(word):
    assert word in NUMERICS
    traits = Traits(deterministic=False, math_mode="tf32")
    assert row(Numerics.parse(word).refusal(traits)).status is RowStatus.REFUSED
