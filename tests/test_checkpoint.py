import errno
import json
import os
import subprocess
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st
from safetensors.numpy import load_file

from mucudnn.errors import CheckpointError
from mucudnn.runtime.training.checkpoints import Checkpoint, Checkpoints, seal
from tests.checkpointing import WORDS, arrays_at, at
from tests.commands import start_python
from tests.examples import examples

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
