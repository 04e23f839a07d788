"""Values survive JSON; whatever else is in a file is named and refused."""

import copy
import dataclasses
import gzip
import json
import math
from functools import partial

import pytest
from hypothesis import given, strategies as st

from mucudnn import codecs
from mucudnn.backends import get_backend
from mucudnn.errors import CacheError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, Direction
from mucudnn.ir.measurement import Measurement, Race, Recording, Verdict, signature
from mucudnn.recording_format import (
    format_recording,
    read_recording,
    recorded_environments,
)
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.store.recordings import record_run, write_recording
from mucudnn.runtime.tuning.tuner import Tuner
from tests.conv_problems import conv_problems
from tests.doubles import places_in, plan_of, problem

sizes = st.integers(1, 9)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
times, moments = st.floats(0, 1e12), st.floats(0, 2e11)
PROBLEMS = conv_problems(dtypes=("float16", "float32", "float64"))


@st.composite
def perfs(draw):
    error = draw(st.none() | names)
    return AlgoPerf(
        algo=draw(names),
        batch=draw(st.integers(1, 300)),
        time_ms=draw(times) if error is None else math.inf,
        workspace=draw(st.integers(0, 2**63 - 1)),
        deterministic=draw(st.booleans()),
        error=error,
        noise_ms=draw(times),
        samples=draw(st.integers(0, 99)),
        math_mode=draw(names),
    )


@st.composite
def measurements(draw):
    perf = draw(perfs())
    return Measurement(
        fingerprint=draw(names),
        problem=draw(PROBLEMS).with_batch(perf.batch),
        perf=perf,
        measured_at=draw(moments),
        version=draw(names),
    )


@st.composite
def recordings(draw):
    """Measurements of some devices, and what is known of these beside them."""
    rows = draw(st.lists(measurements(), max_size=4))
    device = st.sampled_from(["gpu", *(row.fingerprint for row in rows)])
    verdict = st.builds(
        Verdict,
        fingerprint=device,
        problem=PROBLEMS,
        signature=names,
        ratio=st.floats(0, 2),
    )
    race = st.builds(
        Race,
        fingerprint=device,
        raced=names,
        times_ms=st.tuples(times, times),
        measured_at=moments,
    )
    verdicts, races = (draw(st.lists(one, max_size=3)) for one in (verdict, race))
    listed = [one.fingerprint for one in (*rows, *verdicts, *races)]
    known = st.sampled_from(listed) if listed else st.nothing()
    texts = st.dictionaries(names, names, max_size=4)
    return Recording(
        measurements=rows,
        environments=draw(st.dictionaries(known, texts)),
        alignments=draw(st.dictionaries(known, st.integers(1, 1 << 20))),
        verdicts=verdicts,
        races=races,
    )


PROBLEM = ConvProblem(
    direction=Direction.BACKWARD_FILTER, x_shape=(4, 3, 8, 7), w_shape=(5, 3, 3, 3)
)
PERF = AlgoPerf(algo="FFT", batch=2, time_ms=1.5, workspace=64)
FAILED = AlgoPerf(algo="GEMM", batch=2, time_ms=math.inf, workspace=0, error="no")


def through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


@given(PROBLEMS, perfs())
def test_problems_and_perfs_survive(problem, perf):
    data = through_json(codecs.encode_fields(problem))
    assert codecs.decode_fields("problem", ConvProblem, data) == problem
    assert codecs.decode_perf("perf", through_json(codecs.perf_to_dict(perf))) == perf


@pytest.mark.parametrize(
    ("value", "to_dict", "from_dict"),
    [
        (
            PROBLEM,
            codecs.encode_fields,
            partial(codecs.decode_fields, "problem", ConvProblem),
        ),
        (PERF, codecs.perf_to_dict, partial(codecs.decode_perf, "perf")),
        (FAILED, codecs.perf_to_dict, partial(codecs.decode_perf, "perf")),
    ],
)
def test_each_field_is_needed_and_typed(value, to_dict, from_dict):
    for field in dataclasses.fields(value):
        without = to_dict(value)
        del without[field.name]
        with pytest.raises(ValueError, match=rf"\.{field.name}: missing"):
            from_dict(without)
        with pytest.raises(ValueError, match=rf"\.{field.name}"):
            from_dict(to_dict(value) | {field.name: {"not": "this"}})
    with pytest.raises(ValueError, match=r"\.colour: unknown"):
        from_dict(to_dict(value) | {"colour": 1})
    with pytest.raises(ValueError, match="is not an object"):
        from_dict([])


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("batch", 0),
        ("batch", True),
        ("batch", 2.0),
        ("workspace", -1),
        ("workspace", 2**63),
        ("time_ms", None),
        ("time_ms", 10**400),
        ("noise_ms", -0.5),
        ("samples", -1),
        ("deterministic", 1),
        ("algo", "\ud800"),
        ("error", 5),
        ("error", "an error, and yet a time"),
    ],
)
def test_a_bad_perf_is_named(field, bad):
    data = codecs.perf_to_dict(PERF) | {field: bad}
    named = "time_ms" if field == "error" and isinstance(bad, str) else field
    with pytest.raises(ValueError, match=rf"perf\.{named}"):
        codecs.decode_perf("perf", data)


def test_contradictions_are_value_errors():
    data = codecs.encode_fields(PROBLEM)
    with pytest.raises(ValueError, match=r"direction.*forward"):
        codecs.decode_fields("problem", ConvProblem, data | {"direction": "sideways"})
    for shape in ([], [0, 3, 8, 7], [4, 2, 8, 7], [4, 3, 1, 1]):
        with pytest.raises(ValueError, match="problem"):
            codecs.decode_fields("problem", ConvProblem, data | {"x_shape": shape})
    data = codecs.encode_fields(ConvPlan(PROBLEM, (PERF, PERF)))
    data["steps"].pop()
    with pytest.raises(ValueError, match="plan: plan covers 2 of 4"):
        codecs.decode_fields("plan", ConvPlan, data)
    for bad in (math.inf, math.nan, -1.0):  # a time without an error
        with pytest.raises(ValueError, match="time_ms"):
            codecs.perf_to_dict(dataclasses.replace(PERF, time_ms=bad))


@given(PROBLEMS, PROBLEMS, sizes)
def test_keys_forget_the_batch_and_nothing_else(problem, other, batch):
    key = codecs.problem_key(problem)
    assert key == codecs.problem_key(problem.with_batch(batch))
    assert codecs.problem_from_key(key, batch) == problem.with_batch(batch)
    same = problem.with_batch(1) == other.with_batch(1)
    assert (key == codecs.problem_key(other)) == same
    fields = {field.name for field in dataclasses.fields(ConvProblem)}
    assert set(json.loads(key)) == fields


def test_a_bad_key_is_refused():
    for key in ("", "{}", "[]", codecs.problem_key(PROBLEM).replace('"N"', "4")):
        with pytest.raises(ValueError, match=r".+"):
            codecs.problem_from_key(key, 1)


@given(recordings(), st.booleans())
def test_a_recording_survives(recording, compress):
    data = format_recording(recording, compress=compress)
    found = read_recording(data)
    for kind in ("measurements", "verdicts", "races"):
        one, other = getattr(found, kind), getattr(recording, kind)
        assert sorted(map(repr, one)) == sorted(map(repr, other))
    assert found.alignments == recording.alignments
    environments = recorded_environments(data)
    fingerprints = dict.fromkeys(row.fingerprint for row in recording.measurements)
    assert list(environments)[: len(fingerprints)] == list(fingerprints)
    known = {name: recording.environments.get(name, {}) for name in environments}
    assert environments == known
    again = dataclasses.replace(found, environments=environments)
    assert format_recording(again, compress=compress) == data


def row(fingerprint="gpu", batch=2, algo="GEMM", time_ms=1.0):
    return Measurement(
        fingerprint=fingerprint,
        problem=PROBLEM.with_batch(batch),
        perf=AlgoPerf(algo=algo, batch=batch, time_ms=time_ms, workspace=0),
        measured_at=5.0,
        version="0",
    )


ROWS = [dataclasses.replace(row(), perf=perf) for perf in (PERF, FAILED)]
VERDICT = Verdict(fingerprint="gpu", problem=PROBLEM, signature="a / b", ratio=0.5)
RACE = Race(fingerprint="gpu", raced="a", times_ms=(1.0, 2.0), measured_at=3.0)
RECORDING = json.loads(
    format_recording(
        Recording(
            measurements=ROWS,
            environments={"gpu": {"driver": "580"}},
            alignments={"gpu": 16},
            verdicts=[VERDICT] * 2,
            races=[RACE] * 2,
        )
    )
)
GPU = ("devices", 0)
LAYER = (*GPU, "problems", 0)
SECOND_VERDICT, SECOND_RACE = (*LAYER, "verdicts", 1), (*GPU, "races", 1)
MISSING = object()


@pytest.mark.parametrize("compress", [False, True])
def test_every_truncation_and_other_files_are_refused(compress):
    recording = Recording(measurements=ROWS)
    data = format_recording(recording, compress=compress)
    cuts = [data[:length] for length in range(len(data.rstrip(b"\n")))]
    others = b"", b"\x00", b"[]", b"NaN", b"[" * 100_000, gzip.compress(b"{}")
    for other in (*cuts, *others):
        with pytest.raises(ValueError, match=r".+"):
            read_recording(other)


def broken(path, bad):
    """The recording with something else in one place, or with nothing."""
    found = copy.deepcopy(RECORDING)
    *way, last = path
    place = found
    for step in way:
        place = place[step]
    if bad is MISSING:
        del place[last]
    else:
        place[last] = bad
    return json.dumps(found).encode()


def named(path):
    """A place as messages call it."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(steps).removeprefix(".")


def test_each_member_is_needed_typed_and_named():
    optional = {"driver", "split_alignment", "verdicts", "races"}
    members = [p for p in places_in(RECORDING) if p and isinstance(p[-1], str)]
    assert len(members) > 50
    for path in members:
        for bad in (MISSING, [{"not": "this"}]):
            if bad is MISSING and path[-1] in optional:
                read_recording(broken(path, bad))
                continue
            with pytest.raises(ValueError, match=r".+") as caught:
                read_recording(broken(path, bad))
            if len(path) > 1:
                assert named(path) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "bad", "message"),
    [
        (("kind",), "other", "kind"),
        (("schema",), 3, "schema is 3"),
        (("more",), 2, "recording.more: unknown"),
        (("devices",), RECORDING["devices"] * 2, r"\[1\].fingerprint: 'gpu' occurs"),
        ((*GPU, "split_alignment"), 0, "0 is below 1"),
        ((*GPU, "split_alignment"), "16", "is not of type int"),
        ((*GPU, "environment"), {"\ud800": "x"}, "is not Unicode"),
        (
            (*LAYER, "problem", "x_shape"),
            [4, 3, 8, 7],
            'does not start with "N"',
        ),
        ((*SECOND_VERDICT, "batch"), 0, "0 is below 1"),
        ((*SECOND_VERDICT, "ratio"), -0.5, "-0.5 is below 0"),
        ((*SECOND_VERDICT, "more"), 5, "unknown"),
        ((*SECOND_RACE, "first_ms"), -1.0, "-1.0 is below 0"),
        ((*SECOND_RACE, "measured_at"), 1e99, r"1e\+99"),
        ((*SECOND_RACE, "more"), 5, "unknown"),
    ],
)
def test_a_bad_recording_is_located(path, bad, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_recording(broken(path, bad))
    assert len(path) == 1 or named(path) in str(caught.value)


@pytest.mark.parametrize("limit", [None, 0, 1 << 40])
def test_a_plan_may_know_its_limit_and_older_files_do_not(limit):
    plan = ConvPlan(PROBLEM, (dataclasses.replace(PERF, batch=PROBLEM.batch),))
    older = codecs.encode_fields(plan)
    assert set(older) == {"problem", "steps"}
    assert codecs.decode_fields("plan", ConvPlan, older).workspace_limit is None
    data = plan if limit is None else plan.under(limit)
    again = codecs.decode_fields("plan", ConvPlan, codecs.encode_fields(data))
    assert again == plan
    assert again.workspace_limit == limit
    for bad in ("3", 1.5, True, 1 << 70):
        with pytest.raises(ValueError, match="workspace_limit"):
            codecs.decode_fields("plan", ConvPlan, older | {"workspace_limit": bad})


# Recordings in files.


def test_a_file_without_verdicts_is_as_good_as_ever_and_signatures_differ():
    """As files were written before there were any."""
    rows = [row("a"), row("b", batch=3)]
    data = format_recording(Recording(measurements=rows))
    assert b"verdicts" not in data
    assert b"split_alignment" not in data
    recording = read_recording(data)
    assert recording.measurements == tuple(rows)
    assert (recording.verdicts, recording.alignments) == ((), {})
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


def test_a_file_appears_whole_or_stays_as_it_was(tmp_path):
    file = tmp_path / "out.json"
    write_recording(file, Recording(measurements=[row()]))
    before = file.read_bytes()
    unwritable = row(time_ms=math.nan)
    with pytest.raises(ValueError, match="finite"):
        write_recording(file, Recording(measurements=[row(), unwritable]))
    assert file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [file]
    recording = Recording(measurements=[row()])
    with pytest.raises(CacheError, match="nowhere"):
        write_recording(tmp_path / "nowhere" / "out.json", recording)


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
