"""Weights out of a trainer and into another one, by files anybody reads and writes."""

import errno
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mucudnn.errors import CheckpointError
from tests.training_cases import Epochs, examples, trainer, weights

BATCH = 8


def trained(**options):
    made = trainer(**options)
    made.step(*examples(BATCH))
    return made


@pytest.fixture(scope="module")
def made():
    return trained()


@pytest.fixture
def path(made, tmp_path):
    made.save_weights(tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_any_reader_of_the_format_has_them_and_any_program_may_write_them(made, path):
    found = load_file(path)
    assert set(found) == {
        *("conv/weight", "conv/bias", "linear/weight", "linear/bias"),
        *(f"batch_norm/{n}" for n in ("weight", "bias", "running_mean", "running_var")),
    }
    save_file(found, path)
    other = trainer()
    other.load_weights(path)
    for state in (weights(made), weights(other)):
        for name, array in found.items():
            np.testing.assert_array_equal(array, state[name])
            assert array.dtype == state[name].dtype


def test_another_trainer_answers_the_same_with_them(made, path):
    other = trainer(seed=7)
    images, _ = examples(20, seed=1)
    assert (other.predict(images) != made.predict(images)).any()
    before = weights(other)
    other.load_weights(str(path))
    np.testing.assert_array_equal(other.predict(images), made.predict(images))
    momenta = before.keys() - load_file(path).keys()
    assert momenta
    for name in momenta:
        np.testing.assert_array_equal(weights(other)[name], before[name])
    epochs = Epochs(20, BATCH, partial=True)
    assert other.evaluate(epochs) == made.evaluate(epochs)


def without(name):
    return lambda arrays: arrays.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("conv/bias"), r"1 are missing \(conv/bias\), 0 are unknown"),
        (lambda a: a.update(more=np.zeros(3)), r"0 are missing \(\), 1 are unknown"),
        (
            lambda a: a.update({"conv/bias": np.zeros(3, "f4")}),
            r"bias must .*, got .*3",
        ),
        (
            lambda a: a.update({"conv/bias": np.zeros(4, "f2")}),
            "bias must .*, got float16",
        ),
    ],
)
def test_other_tensors_are_refused_by_name(path, change, message):
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)
    other = trainer()
    before = weights(other)
    with pytest.raises(CheckpointError, match=message):
        other.load_weights(path)
    for name, array in weights(other).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("place", [3, 20, 300, -1])
def test_damage_is_seen(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 0x41
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"cannot load weights from .*w\.safeten"):
        trainer().load_weights(path)


def test_there_is_no_such_file(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"cannot read weights from .*No such file"
    ):
        trainer().load_weights(tmp_path / "none")
    with pytest.raises(
        CheckpointError, match=r"cannot read .* a directory, not a file"
    ):
        trainer().load_weights(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"cannot write weights to .*No such file"
    ):
        trainer().save_weights(tmp_path / "none" / "w")


def test_a_full_disk_loses_nothing(made, path, monkeypatch):
    before = path.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            trained().save_weights(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float64"])
def test_every_type_survives(tmp_path, dtype):
    dtype = np.dtype(dtype).name
    one, other = (trainer(backend="null", options={"dtype": dtype}) for _ in range(2))
    one.save_weights(tmp_path / "w")
    assert {str(a.dtype) for a in load_file(tmp_path / "w").values()} >= {dtype}
    other.load_weights(tmp_path / "w")
