"""Checkpoints of a training and how it goes on from them."""

import copy
import errno
import json
import math
import os
import shutil
import subprocess
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st
from safetensors.numpy import load_file, save

from mucudnn.errors import CheckpointError
from mucudnn.runtime.training.checkpoints import (
    Checkpoint,
    Checkpoints,
    read_arrays,
    read_header,
    seal,
    write_arrays,
)
from mucudnn.runtime.training.history import plans_of, read_resumption
from mucudnn.runtime.training.loop import fit
from tests.checkpointing import WORDS, arrays_at, at, forge as forge_file
from tests.commands import done, refused, start_python
from tests.doubles import places_in
from tests.examples import examples
from tests.training_cases import Epochs, trainer

SCRIPT = Path(__file__).with_name("checkpointing.py")


def same(found, step):
    expected = arrays_at(step)
    assert found.step == step
    assert found.arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
    assert found.progress == {"epoch": step // 5, "loss": 0.1}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def child(*arguments, stdin=None):
    options = {"environment": {"OPENBLAS_NUM_THREADS": "1"}, "stdin": stdin}
    return start_python(SCRIPT, *arguments, **options)


def test_what_is_saved_is_loaded_and_the_last_two_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.load(WORDS) is None
    for step in (3, 7, 11):
        checkpoints.save(at(step))
        same(checkpoints.load(WORDS), step)
    assert checkpoints.steps() == (11, 7)
    files = [f"step-000000{step}.safetensors" for step in ("07", "11")]
    assert names(checkpoints.folder) == files
    arrays = load_file(checkpoints.folder / files[1])  # as any reader of the format
    assert arrays.keys() == arrays_at(11).keys()
    for name, array in arrays_at(11).items():
        np.testing.assert_array_equal(arrays[name], array)
    # A step is replaced; words are compared as JSON has them.
    words = {"image": (3, 32, 32), "rate": 0.1}
    checkpoints.save(Checkpoint(11, {}, words, {"epoch": 9}))
    found = checkpoints.load(words)
    assert found.progress == {"epoch": 9}
    assert found.words == {"image": [3, 32, 32], "rate": 0.1}


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    where=st.floats(0, 1, exclude_max=True),
    how=st.sampled_from(["flip", "cut", "remove"]),
)
def test_a_damaged_one_is_passed_over(tmp_path, where, how):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at(1))
    checkpoints.save(at(2))
    path = tmp_path / "step-00000002.safetensors"
    raw = bytearray(path.read_bytes())
    place = int(where * len(raw))
    if where < 0.5:  # as often in the header, which is but a small part
        place = int(2 * where * (8 + int.from_bytes(raw[:8], "little")))
    if how == "flip":
        raw[place] ^= 0x41
        path.write_bytes(raw)
    elif how == "cut":
        path.write_bytes(raw[:place])
    else:
        path.unlink()
    if how == "remove":  # then there is no such checkpoint
        same(checkpoints.load(WORDS), 1)
        return
    with pytest.warns(UserWarning, match="damaged .*; continuing from step 1"):
        found = checkpoints.load(WORDS)
    same(found, 1)
    checkpoints.save(at(2))
    same(checkpoints.load(WORDS), 2)


def test_damaged_ones_are_forgotten_and_an_error_if_there_are_no_others(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 9):
        checkpoints.save(at(step))
    (tmp_path / "step-00000009.safetensors").write_bytes(b"")
    checkpoints.save(at(2))
    assert checkpoints.steps() == (2, 1)
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"step 2: .* as arrays: .*too small"):
        checkpoints.load(WORDS)
    with pytest.raises(CheckpointError, match="cannot write"):
        Checkpoints(tmp_path / "step-00000002.safetensors" / "folder").save(at(1))
    for keep in (0, -1):
        with pytest.raises(ValueError, match="at least one"):
            Checkpoints(tmp_path, keep=keep)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"model": "large", "seed": 0}, "model is 'tiny', this one's is 'large'"),
        ({"model": "tiny", "seed": 1}, "seed is 0, this one's is 1"),
        ({**WORDS, "data": "cifar10"}, "data is not stated, this one's is 'cifar10'"),
        ({"model": "tiny"}, "seed is 0, this one's is not stated"),
    ],
)
def test_of_another_training(tmp_path, words, message):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at(1))
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(words)
    same(checkpoints.load(), 1)


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "step-final.json").write_text("mine")
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.save(at(step))
    assert names(tmp_path) == [
        "notes.json",
        "step-00000002.safetensors",
        "step-final.json",
    ]


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at(1))
    before = names(tmp_path)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device"):
            checkpoints.save(at(2))
    assert names(tmp_path) == before
    same(checkpoints.load(WORDS), 1)


@pytest.mark.parametrize("most", [0, 200, 40_000])
def test_files_that_cannot_grow_lose_nothing(tmp_path, most):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at(1))
    before = names(tmp_path)
    with child(tmp_path, most) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "CheckpointError: cannot write the checkpoint of step 2" in errors
    assert names(tmp_path) == before
    same(checkpoints.load(WORDS), 1)


def test_killed_at_any_moment_it_can_go_on(tmp_path):
    """At each of the moments that two checkpoints consist of, and while writing.

    Each process begins where the one before it had got to; it is killed before the next
    thing that it does to the folder, and where a file has so many bytes.
    """
    touches = [f"touch {moment}" for moment in range(1, 46)]
    writes = [f"write {nbytes}" for nbytes in (1, 100, 4096, 100_000, 190_000)]
    checkpoints, last = Checkpoints(tmp_path), 0
    with child(tmp_path, "--dying", stdin=subprocess.PIPE) as process:
        for i, death in enumerate([*touches, *writes, *touches[:14]]):
            print(death, file=process.stdin, flush=True)
            died_of = "SIGXFSZ" if death.startswith("write") else "SIGKILL"
            assert process.stdout.readline() == f"{died_of}\n"
            found = checkpoints.load(WORDS)
            if found is None:
                assert last == 0
                continue
            assert found.step >= last
            same(found, found.step)
            last = found.step
            if i == len(touches) - 1:
                assert last > len(touches) / 2  # the later ones saved twice
        process.stdin.close()
    assert process.returncode == 0


# What earlier versions wrote


def save_first_schema(folder, step, change=lambda body: None):
    """Two files: the arrays, and what says that they are whole."""
    stem = folder / f"step-{step:08}"
    with zipfile.ZipFile(stem.with_suffix(".npz"), "w") as archive:
        for name, array in arrays_at(step).items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array)
    raw = stem.with_suffix(".npz").read_bytes()
    data = {"file": f"{stem.name}.npz", "nbytes": len(raw), "crc32": zlib.crc32(raw)}
    whole = at(step)
    body = {
        "schema": 1,
        "step": step,
        "data": data,
        "words": whole.words,
        "progress": whole.progress,
    }
    change(body)
    text = json.dumps({"crc32": seal(body), **body}, indent=1)
    stem.with_suffix(".json").write_text(text)


def test_older_checkpoints_are_read_and_never_touched(tmp_path):
    for step in (3, 5):
        save_first_schema(tmp_path, step)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.steps() == (5, 3)
    same(checkpoints.load(WORDS), 5)
    for step in (5, 7, 8):
        checkpoints.save(at(step))
        same(checkpoints.load(WORDS), step)
    assert checkpoints.steps() == (8, 5, 3)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("kind", ["json", "npz"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_older_one_is_passed_over(tmp_path, kind, how):
    for step in (1, 2):
        save_first_schema(tmp_path, step)
    path = tmp_path / f"step-00000002.{kind}"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x41
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(raw if how == "flip" else raw[:-100])
    checkpoints = Checkpoints(tmp_path)
    if (kind, how) == ("json", "remove"):
        same(checkpoints.load(WORDS), 1)
        return
    with pytest.warns(UserWarning, match="damaged .*; continuing from step 1"):
        same(checkpoints.load(WORDS), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(schema=2), "another version .* has schema 2"),
        (lambda body: body.update(step=4), "states that it is of step 4"),
        (lambda body: body.pop("words"), "lacks 'words'"),
        (lambda body: body.update(data=3), "does not match its checksum"),
        (lambda body: body.update(progress=[]), "not of type dict"),
    ],
)
def test_a_forged_older_one_says_what_is_wrong(tmp_path, change, message):
    save_first_schema(tmp_path, 3, change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(tmp_path).load(WORDS)


@pytest.mark.parametrize("raw", [b"", b"nothing", b"PK\x03\x04 more"])
def test_rubbish_for_older_arrays(tmp_path, raw):
    def change(body):
        (tmp_path / "step-00000003.npz").write_bytes(raw)
        body["data"] |= {"nbytes": len(raw), "crc32": zlib.crc32(raw)}

    save_first_schema(tmp_path, 3, change)
    with pytest.raises(CheckpointError, match="not an archive of arrays"):
        Checkpoints(tmp_path).load(WORDS)


STEP = 7
NAME = f"step-{STEP:08}.safetensors"


@pytest.fixture(scope="module")
def genuine(tmp_path_factory):
    """In the second epoch, two of its five batches done."""
    folder = tmp_path_factory.mktemp("genuine")
    fit(
        trainer(),
        Epochs(40, 8),
        Epochs(8, 8),
        epochs=2,
        max_steps=STEP,
        checkpoints=Checkpoints(folder),
    )
    return folder


@pytest.fixture
def folder(genuine, tmp_path):
    shutil.copy(genuine / NAME, tmp_path)
    return tmp_path


def forge(folder, change=lambda body: None, arrays=None, *, sealed=True):
    forge_file(folder / NAME, change, arrays, sealed=sealed)


def resume(folder):
    """As the command does."""
    found = Checkpoints(folder).load({})
    made = trainer()
    plans_of(found, made.backend)
    return fit(made, Epochs(40, 8), epochs=2, max_steps=STEP, resume=found)


def put(value, *places):
    def change(body):
        at = body
        for place in places[:-1]:
            at = at[place]
        if value is DELETED:
            del at[places[-1]]
        else:
            at[places[-1]] = value

    return change


DELETED = object()
AT = ("progress", "position")
PLAN = ("progress", "plans", 0)
STEP_OF_PLAN = (*PLAN, "steps", 0)
FORGED = [
    (put(DELETED, "progress"), "lacks 'progress'"),
    (put([], "progress"), r"'progress' of .* is \[\], not of type dict"),
    (put(DELETED, "words"), "lacks 'words'"),
    (put("none", "words"), "'words' of .* is 'none', not of type dict"),
    (put(DELETED, "step"), "lacks 'step'"),
    (put("7", "step"), "'step' of .* is '7'"),
    (put(True, "step"), "'step' of .* is True"),
    (put(8, "step"), "states that it is of step 8"),
    (put(DELETED, "tensors"), "does not state the checksums of its tensors"),
    (put([], "tensors"), "does not state the checksums of its tensors"),
    (put(DELETED, "tensors", "linear/bias"), "does not state the checksums"),
    (put(5, "tensors", "no/such"), "does not state the checksums of its tensors"),
    (put("x", "tensors", "linear/bias"), "'linear/bias' of .* not match its checksum"),
    (put(DELETED, *AT), "progress.position: missing"),
    (put(None, *AT), "position: None is not an object"),
    (put(DELETED, *AT, "ms"), "position.ms: missing"),
    (put(1, *AT, "more"), "position.more: unknown"),
    (put(9999, *AT, "batch"), "9999 batch are more than 7 steps"),
    (put(7, *AT, "batch"), "7 batches of an epoch are done, but it has 5"),
    (put(-1, *AT, "batch"), "position.batch: -1 is below 0"),
    (put(-1, *AT, "epoch"), "position.epoch: -1 is below 0"),
    (put(3, *AT, "epoch"), "reports of 1 epochs, not of the 3"),
    (put(1.0, *AT, "epoch"), "position.epoch: 1.0 is not of type int"),
    (put(10**30, *AT, "epoch"), "does not fit in 64 bits"),
    (put(8, *AT, "steps"), "position.steps: 8 is not the checkpoint's step"),
    (put(math.nan, *AT, "loss"), "position.loss: nan is not finite"),
    (put(math.inf, *AT, "ms"), "position.ms: inf is not finite"),
    (put("0.1", *AT, "learning_rate"), "position.learning_rate: '0.1'"),
    (put(-1, *AT, "correct"), "position.correct: -1"),
    (put(999, *AT, "correct"), "999 correct are more than 16 labels"),
    (put(DELETED, "progress", "epochs"), "progress.epochs: missing"),
    (put({}, "progress", "epochs"), "epochs: {} is not an array"),
    (put([], "progress", "epochs"), "reports of 0 epochs, not of the 1"),
    (put(-1, "progress", "epochs", 0, "epoch"), r"epochs\[0\].epoch: -1 is below 0"),
    (put(5, "progress", "epochs", 0, "epoch"), "in order"),
    (put("x", "progress", "epochs", 0, "loss"), r"epochs\[0\].loss: 'x'"),
    (put("x", "progress", "epochs", 0, "test_loss"), r"epochs\[0\].test_loss: 'x'"),
    (put(DELETED, "progress", "device"), "progress.device: missing"),
    (put(5, "progress", "device"), "device: 5 is not of type str"),
    (put(DELETED, "progress", "plans"), "progress.plans: missing"),
    (put("rubbish", "progress", "plans"), "plans: 'rubbish' is not an array"),
    (put("rubbish", *PLAN), r"plans\[0\]: 'rubbish' is not an object"),
    (put([], *PLAN, "steps"), r"plans\[0\]: .*covers 0 of 8"),
    (put(9999, *STEP_OF_PLAN, "batch"), r"plans\[0\]: .*covers"),
    (put("NONSENSE", *STEP_OF_PLAN, "algo"), r"plans\[0\]: .*no algorithm 'NONSENSE'"),
    (put(1e300, *STEP_OF_PLAN, "time_ms"), r"plans\[0\].steps\[0\].time_ms: 1e\+300"),
    (put(-1, *STEP_OF_PLAN, "workspace"), r"plans\[0\].*workspace: -1"),
    (dict.clear, "does not state the checksums of its tensors"),
    (put(DELETED, "schema"), "lacks 'schema'"),
]


@pytest.mark.parametrize(("change", "message"), FORGED)
def test_a_forged_checkpoint_says_what_is_wrong(folder, change, message):
    forge(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        resume(folder)
    assert "\n" not in str(caught.value)


def test_the_genuine_one_goes_on(folder):
    forge(folder, lambda body: None)
    (report,) = resume(folder)
    assert report.epoch == 0


def test_losses_of_tests_may_be_no_numbers(folder):
    forge(folder, put(math.nan, "progress", "epochs", 0, "test_loss"))
    (report,) = resume(folder)
    assert math.isnan(report.test_loss)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 10)
    | st.integers()
    | st.floats()
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=3,
)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_written_there_is_no_traceback(genuine, folder, data):
    shutil.copy(genuine / NAME, folder)
    body = read_header(folder / NAME)
    del body["crc32"]  # which is always right
    place = data.draw(st.sampled_from([p for p in places_in(body) if p]))
    value = data.draw(st.just(DELETED) | values)
    forge(folder, put(copy.deepcopy(value) if value is not DELETED else value, *place))
    try:
        found = Checkpoints(folder).load()
        read_resumption(found)
    except CheckpointError:
        return
    at = found.progress["position"]
    assert found.step == at["steps"] == STEP
    assert 0 <= at["batch"] <= STEP


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('"' + "\\ud800" + '"', "holds no JSON object"),
    ],
)
def test_a_header_that_is_no_object_is_damage(folder, text, message):
    (folder / NAME).write_bytes(save({}, metadata={"mucudnn": text}))
    with pytest.raises(CheckpointError, match=message):
        resume(folder)


def test_arrays_of_somebody_else_are_no_checkpoint(folder):
    (folder / NAME).write_bytes(save(arrays_of(folder), metadata={"format": "np"}))
    with pytest.raises(CheckpointError, match="holds arrays, but is not a checkpoint"):
        resume(folder)


# Arrays


def arrays_of(folder):
    return read_arrays(folder / NAME, None)


def test_arrays_come_back_as_they_were(tmp_path):
    arrays = {
        "a/b.npy": np.arange(6.0).reshape(2, 3).T,
        "scalar": np.array(5),
        "none": np.zeros((0, 3), np.float16),
        "half": np.array([1.5, np.inf, np.nan], np.float16),
        "brain": np.array([[1.5], [-3e38]], ml_dtypes.bfloat16),
        "pixels": np.arange(256, dtype=np.uint8)[::-2],
        "big": np.arange(3, dtype=">i4"),
    }
    path = tmp_path / "arrays.safetensors"
    write_arrays(path, arrays, {})
    found = read_arrays(path, read_header(path))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype.newbyteorder("=")
        assert found[name].flags.writeable


@pytest.mark.parametrize("values", [np.zeros(2, "c16"), np.array(["cat"])])
def test_arrays_that_the_format_cannot_hold(tmp_path, values):
    with pytest.raises(ValueError, match="safetensors file cannot hold"):
        write_arrays(tmp_path / "x", {"x": values}, {})
    assert not [*tmp_path.iterdir()]


def without_one(arrays):
    arrays.popitem()


def largest_as(change):
    def replace(arrays):
        name = max(arrays, key=lambda name: arrays[name].size)
        arrays[name] = change(arrays[name])

    return replace


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_one, "another model: 1 are missing"),
        (
            lambda arrays: arrays.update(more=np.zeros(3)),
            r"0 are missing \(\), 1 are unknown \(more\)",
        ),
        (largest_as(lambda array: array[:1]), "must be float32"),
        (largest_as(lambda array: array.astype(np.float16)), "must be float32"),
    ],
)
def test_tensors_of_another_model_are_named(folder, change, message):
    arrays = arrays_of(folder)
    change(arrays)
    forge(folder, arrays=arrays)
    with pytest.raises(CheckpointError, match=message):
        resume(folder)


def container(header, data=b""):
    """A file of the format, well or ill."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(dtype="F32", shape=(1,), begin=0, end=4, name="x"):
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


_X = '"x":{{"dtype":"F32","shape":[1],"data_offsets":[{},{}]}}'
TWICE = f"{{{_X.format(0, 4)},{_X.format(4, 8)}}}".encode()
RUBBISH = [
    (b"", "header too small"),
    (b"nothing", "header too small"),
    (b"\xff" * 16, "header too large"),
    ((10**6).to_bytes(8, "little") + b"{}", "invalid header length"),
    (container(b"["), "invalid JSON"),
    (container(b"[" * 100_000), "invalid JSON"),
    (container({}), "is not a checkpoint"),
    (container({}, b"more"), "not fully covered"),
    (container(one(), b"123"), "not fully covered"),
    (container(TWICE, b"12345678"), "invalid offset"),
    (container(one() | one(name="y"), b"1234"), "invalid offset"),
    (container({"__metadata__": {"mucudnn": 3}}), "invalid type"),
]


@pytest.mark.parametrize(("raw", "message"), RUBBISH)
def test_rubbish_for_arrays(folder, raw, message):
    (folder / NAME).write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        resume(folder)


@pytest.mark.parametrize(
    "claim",
    [
        one(shape=[10**9]),
        one(shape=[1 << 40, 1 << 30]),
        one(shape=[1 << 62, 1 << 62, 0], end=0),
        one(shape=[-1]),
        one(shape=[0.5]),
        one(shape=[0] * 100, end=0),
        one(begin=4, end=0),
        one(end=1 << 60),
        one(dtype="F8_E4M3", shape=[4]),
        one(dtype="NONSENSE"),
    ],
)
def test_a_header_that_lies_is_not_believed(tmp_path, claim):
    """Refused before memory for it is asked for."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        container(claim, b"1234" if claim["x"]["data_offsets"][1] else b"")
    )
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        read_arrays(path, None)


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_raise_nothing_else(tmp_path, data):
    path = tmp_path / "x.safetensors"
    write_arrays(path, {"x": np.arange(4.0), "y": np.array(3)}, {"step": 3})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        read_arrays(path, read_header(path))
    except ValueError:
        return


# What a newer version wrote


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("schema", [3, 99, "3.0"])
def test_a_newer_checkpoint_is_never_lost(folder, schema, sealed):
    forge(folder, put(schema, "schema"), sealed=sealed)
    (folder / "step-00000003.npz").write_bytes(b"with words that have another name")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    checkpoints = Checkpoints(folder, keep=1)
    with pytest.raises(CheckpointError, match=r"of another version .* has schema"):
        checkpoints.load({})
    old = Checkpoints(folder.parent / "old")
    shutil.rmtree(old.folder, ignore_errors=True)
    fit(trainer(), Epochs(16, 8), epochs=2, checkpoints=old)
    last = old.load({})
    with pytest.raises(CheckpointError, match="another version"):
        checkpoints.save(type(last)(STEP, last.arrays, last.words, dict(last.progress)))
    for step in (1, 5, 20, 21):
        checkpoints.save(type(last)(step, {}, {}, {}))
    after = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert after.items() >= before.items()


def test_the_command_says_so_in_one_line(tmp_path):
    options = (
        *("train", "digits", "--data", "synthetic:length=16", "--batch", "8"),
        *("--backend", "null", "--cache", "none", "--checkpoint", str(tmp_path)),
        *("--lr-schedule", "constant"),
    )
    done(*options, "--epochs", 1)
    path = tmp_path / "step-00000002.safetensors"
    whole = path.read_bytes()
    for change, message in (
        (put(DELETED, *AT), "progress.position: missing"),
        (put("rubbish", "progress", "plans"), "plans: 'rubbish'"),
        (put(3, "schema"), "a newer one wrote it"),
    ):
        path.write_bytes(whole)
        forge_file(path, change)
        line = refused(*options, "--epochs", 2, "--resume")
        assert line.startswith("mucudnn: error: the checkpoint of step 2")
        assert message in line
        assert path.exists()
