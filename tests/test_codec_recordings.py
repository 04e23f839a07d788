"""What a recording says of its devices, and how it gets into a file."""

import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.errors import CacheError
from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.measurement import Measurement, Recording, Verdict, signature
from mucudnn.recording_format import (
    format_recording,
    read_recording,
    recorded_environments,
)
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.store.recordings import record_run, write_recording
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import plan_of, problem

texts = st.text(st.characters(codec="utf-8"), max_size=8)
environments = st.dictionaries(texts, texts, max_size=4)


verdicts = st.builds(
    Verdict,
    fingerprint=st.sampled_from(["gpu", "other"]),
    problem=st.sampled_from([problem(4), problem(5), problem(4, stride=2)]),
    signature=texts,
    ratio=st.floats(0, 2),
)


def row(fingerprint="gpu", batch=2, algo="GEMM"):
    return Measurement(
        fingerprint=fingerprint,
        problem=problem(batch),
        perf=AlgoPerf(algo=algo, batch=batch, time_ms=1.0, workspace=0),
        measured_at=5.0,
        version="0",
    )


@given(st.dictionaries(texts, environments, min_size=1, max_size=3), st.booleans())
def test_environments_survive(known, compress):
    rows = [row(fingerprint) for fingerprint in known]
    recording = Recording(measurements=rows, environments=known)
    data = format_recording(recording, compress=compress)
    assert recorded_environments(data) == known
    assert list(recorded_environments(data)) == list(known)
    assert read_recording(data).measurements == tuple(rows)


@given(
    st.lists(verdicts, max_size=5),
    st.dictionaries(st.just("gpu"), st.integers(1, 1 << 20)),
    st.booleans(),
)
def test_verdicts_and_alignments_survive(found, aligned, compress):
    rows = [row(fingerprint) for fingerprint in ("gpu", "other")]
    recording = Recording(measurements=rows, alignments=aligned, verdicts=found)
    data = format_recording(recording, compress=compress)
    recording = read_recording(data)
    assert recording.measurements == tuple(rows)
    assert recording.alignments == aligned
    assert sorted(map(repr, recording.verdicts)) == sorted(map(repr, found))


def test_a_file_without_verdicts_and_noise_is_as_good_as_ever():
    """As files were written before there were any."""
    rows = [row("a"), row("b", batch=3)]
    data = format_recording(Recording(measurements=rows))
    assert b"verdicts" not in data
    assert b"split_alignment" not in data
    recording = read_recording(data)
    assert recording.measurements == tuple(rows)
    assert (recording.verdicts, recording.alignments) == ((), {})


def test_a_signature_tells_plans_apart():
    null, one = get_backend("null"), problem(8)
    plans = [
        plan_of(null, one, *steps)
        for steps in (
            [("FAST", 8)],
            [("SLOW", 8)],
            [("FAST", 4), ("FAST", 4)],
            [("FAST", 4), ("SLOW", 4)],
            [("SLOW", 4), ("FAST", 4)],
            [("FAST", 6), ("FAST", 2)],
        )
    ]
    signatures = {signature(plan, baseline) for plan in plans for baseline in plans}
    assert len(signatures) == len(plans) ** 2


def test_what_is_not_known_is_empty():
    known = {"b": {"driver": "580"}, "c": {}}
    rows = [row("a"), row("b")]
    data = format_recording(Recording(measurements=rows, environments=known))
    assert recorded_environments(data) == {"a": {}, "b": {"driver": "580"}}


def test_a_file_appears_whole_or_stays_as_it_was(tmp_path):
    file = tmp_path / "out.json"
    write_recording(file, Recording(measurements=[row()]))
    before = file.read_bytes()
    with pytest.raises(ValueError, match="finite"):
        write_recording(file, Recording(measurements=[row(), _unwritable()]))
    assert file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [file]
    recording = Recording(measurements=[row()])
    with pytest.raises(CacheError, match="nowhere"):
        write_recording(tmp_path / "nowhere" / "out.json", recording)


def _unwritable():
    perf = AlgoPerf(algo="A", batch=2, time_ms=float("nan"), workspace=0)
    return Measurement(
        fingerprint="gpu", problem=problem(2), perf=perf, measured_at=5.0, version="0"
    )


def test_a_cache_tells_of_one_convolution_at_every_size():
    with BenchmarkCache() as cache:
        other = problem(3, w_shape=(5, 3, 3, 3))
        for fingerprint in ("gpu", "other"):
            cache.put(fingerprint, problem(2), [row().perf, row(batch=1).perf])
            cache.put(fingerprint, other, [row(batch=3).perf])
        found = cache.rows("gpu", problem(7))
        assert {(m.fingerprint, m.problem) for m in found} == {
            ("gpu", problem(1)),
            ("gpu", problem(2)),
        }
        assert len(cache.rows("gpu")) == 3
        assert len(cache.rows()) == 6
        assert len(cache.rows(problem=other)) == 2


def test_old_rows_count_only_where_they_were_used(tmp_path):
    tuner = Tuner(backend=get_backend("null"))
    old = AlgoPerf(algo="OLD", batch=3, time_ms=1.0, workspace=0)
    tuner.cache.put("null", problem(8), [old])
    table = tuner.measure(problem(8))
    file, later = tmp_path / "out.json", 4e9

    def recorded(tables, since):
        rows = record_run(file, tuner, [problem(8)], tables, since)
        found = read_recording(file.read_bytes()).measurements
        assert len(found) == rows
        return {m.perf for m in found}

    assert recorded([table], later) == {*table.perfs}
    assert old in recorded([], 0.0)
    for problems, tables, since in (([problem(8)], [], later), ([], [table], 0.0)):
        with pytest.raises(CacheError, match="nothing was measured"):
            record_run(file, tuner, problems, tables, since)
