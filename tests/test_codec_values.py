"""Values survive JSON; whatever else is in a file is named and refused."""

import copy
import dataclasses
import gzip
import json
import math
from functools import partial

import pytest
from hypothesis import given, strategies as st

from mucudnn import codecs, recording_format
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, Direction
from mucudnn.ir.measurement import Measurement, Race, Recording, Verdict
from tests.conv_problems import conv_problems

sizes = st.integers(1, 9)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
times = st.floats(0, 1e12)
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
        measured_at=draw(st.floats(0, 2e11)),
        version=draw(names),
    )


PROBLEM = ConvProblem(
    direction=Direction.BACKWARD_FILTER, x_shape=(4, 3, 8, 7), w_shape=(5, 3, 3, 3)
)
PERF = AlgoPerf(algo="FFT", batch=2, time_ms=1.5, workspace=64)
FAILED = AlgoPerf(algo="GEMM", batch=2, time_ms=math.inf, workspace=0, error="no")


def through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


@given(PROBLEMS)
def test_a_problem_survives(problem):
    data = through_json(codecs.encode_fields(problem))
    assert codecs.decode_fields("problem", ConvProblem, data) == problem


@given(perfs())
def test_a_perf_survives(perf):
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


@given(st.lists(measurements(), max_size=5), st.booleans())
def test_a_recording_survives(rows, compress):
    recording = Recording(measurements=rows)
    data = recording_format.format_recording(recording, compress=compress)
    parsed = recording_format.read_recording(data).measurements
    assert sorted(map(repr, parsed)) == sorted(map(repr, rows))
    fingerprints = tuple(dict.fromkeys(row.fingerprint for row in rows))
    assert tuple(recording_format.recorded_environments(data)) == fingerprints
    recording = Recording(measurements=parsed)
    assert recording_format.format_recording(recording, compress=compress) == data


ROWS = [
    Measurement(
        fingerprint="gpu",
        problem=PROBLEM.with_batch(2),
        perf=perf,
        measured_at=5.0,
        version="0",
    )
    for perf in (PERF, FAILED)
]
VERDICT = Verdict(fingerprint="gpu", problem=PROBLEM, signature="a / b", ratio=0.5)
RACE = Race(fingerprint="gpu", raced="a", times_ms=(1.0, 2.0), measured_at=3.0)
RECORDING = json.loads(
    recording_format.format_recording(
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
    data = recording_format.format_recording(recording, compress=compress)
    cuts = [data[:length] for length in range(len(data.rstrip(b"\n")))]
    others = b"", b"\x00", b"[]", b"NaN", b"[" * 100_000, gzip.compress(b"{}")
    for other in (*cuts, *others):
        with pytest.raises(ValueError, match=r".+"):
            recording_format.read_recording(other)


@pytest.mark.parametrize(
    ("path", "bad", "message"),
    [
        (("kind",), "other", "kind"),
        (("schema",), 3, "schema is 3"),
        (("more",), 2, "recording.more: unknown"),
        (("devices",), {}, "devices: .* not an array"),
        (("devices",), RECORDING["devices"] * 2, r"\[1\].fingerprint: 'gpu' occurs"),
        ((*GPU, "fingerprint"), 7, "fingerprint: 7"),
        ((*GPU, "split_alignment"), 0, "split_alignment: .*0 is below 1"),
        ((*GPU, "split_alignment"), "16", "split_alignment: .*is not of type int"),
        ((*GPU, "environment"), MISSING, "environment: missing"),
        ((*GPU, "environment"), None, "environment: None is not an object"),
        (
            (*GPU, "environment"),
            {"driver": 580},
            "environment.driver: 580 is not of type str",
        ),
        ((*GPU, "environment"), {"\ud800": "x"}, "environment: .* is not Unicode"),
        ((*LAYER, "rows"), 1, "rows"),
        ((*LAYER, "rows", 1, "batch"), "2", r"rows\[1\].batch: '2'"),
        ((*LAYER, "rows", 1, "measured_at"), None, r"rows\[1\].measured_at"),
        (
            (*LAYER, "problem", "x_shape"),
            [4, 3, 8, 7],
            r'problem.x_shape: .* does not start with "N"',
        ),
        ((*SECOND_VERDICT, "batch"), 0, r"verdicts\[1\].batch: 0 is below 1"),
        (
            (*SECOND_VERDICT, "batch"),
            "4",
            r"verdicts\[1\].batch: '4' is not of type int",
        ),
        ((*SECOND_VERDICT, "ratio"), -0.5, r"verdicts\[1\].ratio: -0.5 is below 0"),
        ((*SECOND_VERDICT, "ratio"), None, r"verdicts\[1\].ratio: None"),
        ((*SECOND_VERDICT, "signature"), 5, r"verdicts\[1\].signature: 5"),
        ((*SECOND_VERDICT, "more"), 5, r"verdicts\[1\].more: unknown"),
        ((*SECOND_RACE, "first_ms"), -1.0, r"races\[1\].first_ms: -1.0 is below 0"),
        (
            (*SECOND_RACE, "second_ms"),
            "1",
            r"races\[1\].second_ms: '1' is not of type float",
        ),
        ((*SECOND_RACE, "measured_at"), 1e99, r"races\[1\].measured_at: 1e\+99"),
        ((*SECOND_RACE, "raced"), 5, r"races\[1\].raced: 5"),
        ((*SECOND_RACE, "more"), 5, r"races\[1\].more: unknown"),
    ],
)
def test_a_bad_recording_is_located(path, bad, message):
    broken = copy.deepcopy(RECORDING)
    *way, last = path
    place = broken
    for step in way:
        place = place[step]
    if bad is MISSING:
        del place[last]
    else:
        place[last] = bad
    if "problems" in way:
        message = rf"devices\[0\].problems\[0\].{message}"
    elif "devices" in way:
        message = rf"devices\[0\].{message}"
    with pytest.raises(ValueError, match=message):
        recording_format.read_recording(json.dumps(broken).encode())


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
