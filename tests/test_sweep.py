"""Measuring: every algorithm, every size, under limits, once; what a row says of it."""

import dataclasses
import math
import subprocess
import time
import weakref

import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import Backend, get_backend
from mucudnn.backends.virtual import VirtualArray
from mucudnn.codecs import decode_perf, perf_to_dict
from mucudnn.errors import BackendError, OutOfMemoryError, UnsupportedError
from mucudnn.ir.conv import AlgoPerf, Direction
from mucudnn.ir.numerics import NUMERICS, Numerics, RowStatus, Traits
from mucudnn.passes.microbatch import aligned_batches, candidate_batches
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import compare
from mucudnn.suites import Layer
from tests.commands import finish, start_python
from tests.doubles import QUICK, measuring, problem, tight, watched
from tests.examples import examples

KIB = 1 << 10
POLICIES = ("undivided", "powers_of_two", "all")


def tuner(**options):
    return Tuner(**{"backend": "null", "rule": QUICK, "cache": None, **options})


def sizes(table):
    return tuple(sorted({perf.batch for perf in table.perfs}))


@pytest.mark.parametrize("direction", Direction)
def test_every_algorithm_is_a_row_at_every_size(backend, direction):
    table = tuner(backend=backend, prune=False).measure(problem(5, direction))
    conv = backend.conv
    rows = {(p.algo, p.batch): p for p in table.perfs}
    assert len(rows) == len(table.perfs)
    for batch in aligned_batches(table.problem, (1, 2, 4, 5), backend.split_alignment):
        micro = table.problem.with_batch(batch)
        named = dict(conv.algorithms(micro))
        assert {a for a, b in rows if b == batch} == {
            *named,
            *dict(conv.excluded(micro)),
        }
        for algo, nbytes in named.items():
            row = rows[algo, batch]
            refused = row.status is RowStatus.REFUSED
            if refused or (row.error is not None and backend.may_crash):
                continue
            assert row.error is None
            assert row.workspace == nbytes
            assert row.time_ms > 0
    assert all(
        rows[key].error
        for key in rows
        if key[0] not in dict(conv.algorithms(table.problem))
    )


@pytest.mark.parametrize("batch", [1, 2, 13, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_says_which_sizes(policy, batch):
    table = tuner(batch_policy=policy, prune=False).measure(problem(batch))
    assert sizes(table) == candidate_batches(batch, policy)
    assert len(table.perfs) == 2 * len(sizes(table))


@pytest.mark.parametrize("limit", [0, 3 * KIB, 17 * KIB, 1 << 30])
def test_pruning_measures_less_and_plans_as_well(limit):
    pruned, exhaustive = (
        tuner(batch_policy="all", prune=prune, validate=False)
        for prune in (True, False)
    )
    whole = problem(61)
    some, every = pruned.measure(whole), exhaustive.measure(whole)
    assert len(some.perfs) < len(every.perfs) == 2 * 61
    planner = pruned.planner
    assert planner([some], limit)[0].time_ms == pytest.approx(
        planner([every], limit)[0].time_ms, rel=0.02
    )


@pytest.mark.parametrize("error", [BackendError, RuntimeError, ValueError])
def test_a_failing_algorithm_is_a_row_and_never_chosen(error):
    def fail(problem, algo):
        if algo == "FAST":
            raise error("status 8")

    backend = watched(before=fail)
    one = tuner(backend=backend)
    table = one.measure(problem())
    failed = [perf for perf in table.perfs if perf.algo == "FAST"]
    assert all(perf.error == f"{error.__name__}: status 8" for perf in failed)
    assert len(failed) == 4
    (plan,) = one.plan([problem()])
    assert {step.algo for step in plan.steps} == {"SLOW"}
    calls = len(backend.conv.calls)
    assert tuner(backend=backend, cache=one.cache).measure(problem()) == table
    assert len(backend.conv.calls) == calls


def test_a_kernel_out_of_memory_is_tried_again():
    short = [True]

    def fail(problem, algo):
        if short[0] and algo == "FAST":
            raise MemoryError("transient")

    backend = watched(before=fail)
    one = tuner(backend=backend)
    assert all(
        p.status is RowStatus.LIMITED
        for p in one.measure(problem()).perfs
        if p.algo == "FAST"
    )
    short[0] = False
    assert all(p.error is None for p in one.measure(problem()).perfs)


def memory(batch, workspace=0):
    return sum(s.nbytes for s in problem(batch).operands()) + workspace


def fitting(limit):
    """What a memory limit leaves, operands and workspace counted."""
    workspaces = {"SLOW": 0, "FAST": KIB}
    return {
        (algo, batch)
        for algo, each in workspaces.items()
        for batch in (1, 2, 4, 8)
        if memory(batch, each * batch) <= limit
    }


@pytest.mark.parametrize(
    ("limits", "reason", "expected"),
    [
        ({"memory_limit": limit}, "memory limit", fitting(limit))
        for limit in (memory(8), memory(4, 4 * KIB) - 1, memory(1) - 1)
    ]
    + [({"time_limit_s": 0.0}, "time limit", set())],
    ids=["no-workspace", "a-byte-short", "nothing", "no-time"],
)
def test_what_a_limit_prevents_is_measured_by_the_next_without_it(
    limits, reason, expected
):
    cache = BenchmarkCache()
    short = tuner(cache=cache, **limits)
    rows = {(p.algo, p.batch): p for p in short.measure(problem()).perfs}
    assert {key for key, p in rows.items() if p.error is None} == expected
    for key in rows.keys() - expected:
        assert rows[key].status is RowStatus.LIMITED
        assert reason in rows[key].error
    remembered = {(p.algo, p.batch) for p in cache.get_all("null", problem())}
    assert remembered == expected
    full = tuner(cache=cache).measure(problem())
    assert all(p.error is None for p in full.perfs)
    assert len(full.perfs) == 8


def test_a_cold_run_is_used_but_not_remembered():
    """The time is up when the first kernel has warmed up."""
    now = [0.0]

    def run(problem, algo):
        now[0] += 0.2

    cache = BenchmarkCache()
    backend = watched(before=run)
    one = measuring(backend, cache, time_limit_s=0.1, clock=lambda: now[0])
    (table,) = one.measure_all([problem()])
    assert [perf.samples for perf in table.usable] == [0]
    assert cache.rows() == ()


class Accountant:
    """A device that knows how much is held at the most."""

    def __init__(self, device):
        self._device = device
        self.peak = self._held = 0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def allocate(self, nbytes):
        buffer = Held((nbytes,))
        self._held += nbytes
        self.peak = max(self.peak, self._held)
        weakref.finalize(buffer, self._free, nbytes)
        return buffer

    def _free(self, nbytes):
        self._held -= nbytes


class Held(VirtualArray):
    __slots__ = ("__weakref__",)


@given(
    limit=st.integers(memory(1), memory(16, 20 * KIB)),
    batch=st.integers(1, 16),
    policy=st.sampled_from(POLICIES),
)
@examples(60)
def test_the_memory_limit_is_hard_and_no_harder(limit, batch, policy):
    null = get_backend("null")
    device = Accountant(null.device)
    backend = Backend("null", device, null.conv)
    one = tuner(backend=backend, memory_limit=limit, batch_policy=policy)
    table = one.measure(problem(batch))
    assert device.peak <= limit
    for perf in table.perfs:
        fits = memory(perf.batch, perf.workspace) <= limit
        assert (perf.error is None) == fits


@pytest.mark.parametrize("most", [0, 4 * KIB, 7 * KIB, 64 * KIB])
def test_an_exhausted_device_still_measures_what_fits(most):
    table = tuner(backend=tight("null", most)).measure(problem())
    for perf in table.perfs:
        specs = problem(perf.batch).operands()
        largest = max(perf.workspace, *(spec.nbytes for spec in specs))
        assert (perf.error is None) == (largest <= most)
        assert (perf.status is RowStatus.LIMITED) == (largest > most)


def test_nothing_is_measured_twice():
    backend = get_backend("null")
    one = tuner(backend=backend)
    table = one.measure(problem())
    clock = backend.device.now_ms
    assert clock > 0
    again = tuner(backend=backend, cache=one.cache, workspace_limit=KIB)
    assert again.measure(problem()) == table
    assert one.measure(problem()) is table
    assert backend.device.now_ms == clock


def test_a_measurement_serves_every_mini_batch():
    backend = watched()
    one = tuner(backend=backend)
    one.measure(problem(8))
    backend.conv.calls.clear()
    one.measure(problem(16))
    assert {batch for _, batch in backend.conv.calls} == {16}
    backend.conv.calls.clear()
    one.measure(problem(7))
    assert {batch for _, batch in backend.conv.calls} == {7}


def test_rows_of_what_would_not_run_are_measured_again():
    """Another math mode, or a workspace that the library no longer asks for."""
    backend = watched()
    one = tuner(backend=backend)
    fast = next(p for p in one.measure(problem()).perfs if p.algo == "FAST")
    for stale in (
        dataclasses.replace(fast, workspace=1, time_ms=1e-9),
        dataclasses.replace(fast, math_mode="tf32", time_ms=1e-9),
    ):
        cache = BenchmarkCache()
        cache.put("null", problem(), [stale])
        table = tuner(backend=backend, cache=cache).measure(problem())
        assert fast in table.perfs
        assert stale not in table.perfs


CHILD = """
import sys
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.suites import parse_problem

rule = StoppingRule(min_samples=1, max_samples=2)
cache = BenchmarkCache(sys.argv[1])
tuner = Tuner(backend=sys.argv[2], cache=cache, rule=rule, prune=False)
problem = parse_problem("n=7,c=4,h=9,w=9,k=4,r=3,s=3,pad=1")
sys.stdin.readline()
table = tuner.measure(problem)
print(sorted((p.algo, p.batch, p.error) for p in table.perfs if p.error is None))
"""


@pytest.mark.parametrize("name", ["null", "cpu"])
def test_two_processes_agree_on_one_set_of_rows(tmp_path, name):
    file = tmp_path / "perf.sqlite"
    both = [
        start_python("-W", "error", "-c", CHILD, file, name, stdin=subprocess.PIPE)
        for _ in range(2)
    ]
    for child in both:
        child.stdin.write("go\n")
        child.stdin.flush()
    outputs = [finish(child) for child in both]
    assert outputs[0] == outputs[1]
    with BenchmarkCache(file) as cache:
        rows = [(m.perf.algo, m.perf.batch, m.perf.error) for m in cache.rows()]
    assert str(sorted(rows)) == outputs[0][0].strip()
    assert len(set(rows)) == len(rows) > 0


def test_progress_counts_every_measurement_once():
    """Sizes descend once the smallest have told what they take."""
    seen, backend = [], watched()
    one = tuner(backend=backend, progress=seen.append)
    table = one.measure(problem(13))
    assert [p.done for p in seen] == list(range(1, len(table.perfs) + 1))
    assert {p.total for p in seen} == {len(table.perfs)}
    sizes = list(dict.fromkeys(p.batch for p in seen))
    assert sizes == [1, 2, 13, 8, 4]
    assert list(dict.fromkeys(batch for _, batch in backend.conv.calls)) == sizes
    one.measure(problem(13))
    assert len(seen) == len(table.perfs)


def test_devices_share_the_sizes():
    devices = [get_backend("null", i) for i in range(3)]
    one = tuner(benchmark_backends=devices, batch_policy="all", prune=False)
    table = one.measure(problem(30))
    assert all(backend.device.now_ms > 0 for backend in devices)
    alone = tuner(batch_policy="all", prune=False).measure(problem(30))
    assert {(p.algo, p.batch) for p in table.perfs} == {
        (p.algo, p.batch) for p in alone.perfs
    }
    assert [p.time_ms for p in table.perfs] == [p.time_ms for p in alone.perfs]


# A time limit holds on a clock that only kernels move.


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
