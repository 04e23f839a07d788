import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.data import (
    FORMATS,
    ArrayDataset,
    Resized,
    SyntheticDataset,
    open_dataset,
    open_digits,
)
from mucudnn.errors import DataError
from tests.commands import python
from tests.data_files import labelled_images, read_all, write_mnist
from tests.examples import examples


def accuracy(train, test):
    """Of the least-squares classifier on pixels, from `train` to `test`."""

    def design(dataset):
        images, labels = read_all(dataset)
        flat = images.reshape(len(images), -1) / 255.0
        return np.column_stack([flat, np.ones(len(flat))]), labels

    x, labels = design(train)
    weights, *_ = np.linalg.lstsq(x, np.eye(train.classes)[labels], rcond=None)
    x, labels = design(test)
    return np.mean((x @ weights).argmax(axis=1) == labels)


def test_synthetic_labels_can_be_learned():
    train, test = (
        open_dataset("synthetic:length=1500", split=split, image=(1, 16, 16))
        for split in ("train", "test")
    )
    assert accuracy(train, test) > 0.95
    noise = open_dataset(
        "synthetic:length=1500,noise=100", split="test", image=(1, 16, 16)
    )
    assert accuracy(train, noise) < 0.5


def test_another_seed_is_another_problem():
    train = SyntheticDataset(1500, image_shape=(1, 16, 16))
    other = SyntheticDataset(300, image_shape=(1, 16, 16), seed=1, split="test")
    assert accuracy(train, other) < 0.5


@given(st.lists(st.integers(0, 10**12 - 1), min_size=1, max_size=6), st.integers(0, 9))
@examples(30)
def test_synthetic_images_follow_from_seed_and_index(indices, seed):
    dataset = SyntheticDataset(10**12, 7, (2, 5, 6), seed=seed)
    images, labels = dataset.read(indices)
    again, _ = dataset.read(indices[::-1])
    np.testing.assert_array_equal(images, again[::-1])
    np.testing.assert_array_equal(labels, np.array(indices) % 7)
    testing = SyntheticDataset(10**12, 7, (2, 5, 6), seed=seed, split="test")
    assert (testing.read(indices)[0] != images).any()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 9), (4, 64, 2)])
def test_synthetic_shapes(shape):
    dataset = open_dataset("synthetic:7", image=shape)
    assert (len(dataset), dataset.image_shape) == (7, shape)
    assert read_all(dataset)[0].shape == (7, *shape)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("synthetic:size=3", "no option 'size'; choose from length, classes, noise"),
        ("synthetic:many", "length of synthetic images must be a number, got 'many'"),
        ("synthetic:noise=", "must be a number, got ''"),
        ("synthetic:noise=nan", "noise must be at least 0 and at most 100, got nan"),
        ("synthetic:length=0", "length must be at least 1, got 0"),
        ("synthetic:classes=-1", "classes must be at least 1, got -1"),
        ("mnist", "mnist needs a folder: mnist:DIR"),
        ("arrays:", "arrays needs a folder"),
        ("digits:here", "digits takes nothing after its name, got 'here'"),
        ("imagenet:DIR", "unknown data set 'imagenet'; choose one of: digits, mnist:"),
        ("", "unknown data set ''"),
    ],
)
def test_bad_requests(spec, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(spec)


def test_bad_split_and_seed():
    with pytest.raises(ValueError, match="choose train or test"):
        open_dataset("synthetic", split="validation")
    with pytest.raises(ValueError, match="seed must be at least 0"):
        open_dataset("synthetic", seed=-1)


def test_formats_are_listed():
    assert FORMATS == (
        "digits",
        "mnist:DIR",
        "cifar10:DIR",
        "cifar100:DIR",
        "folder:DIR",
        "arrays:DIR",
        "synthetic[:length=N,classes=N,noise=X]",
    )


def test_digits():
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    train, test = (open_dataset("digits", split=s) for s in ("train", "test"))
    assert len(train) + len(test) == 1797
    assert abs(len(test) / 1797 - 0.2) < 0.005
    assert train.image_shape == (1, 8, 8)
    assert read_all(train)[0].max() == 255
    assert accuracy(train, test) > 0.9


def test_digits_do_not_import_scikit_learn():
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    code = (
        "import sys; from mucudnn.data import open_digits; "
        "print(len(open_digits('train')), 'sklearn' in sys.modules)"
    )
    assert python("-c", code)[0].split()[1] == "False"


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        open_digits("train")


ROW = b",".join([b"16"] * 64)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        ROW + b",9\n" + ROW + b",10\n",
        ROW + b",9\n" + ROW + b"\n",
        ROW + b",9\n" + ROW + b",9,1\n",
        ROW + b"\n",
        ROW.replace(b"16", b"17") + b",0\n",
        ROW.replace(b"16", b"-1") + b",0\n",
        b"\xff\xfe\n",
    ],
)
def test_foreign_digits(tmp_path, text):
    path = tmp_path / "digits.csv"
    path.write_bytes(text)
    with pytest.raises(DataError, match=r"digits\.csv, byte 0: expected rows of 64"):
        open_digits("train", path)


def test_another_shape_is_made(tmp_path):
    images, labels = write_mnist(tmp_path)
    dataset = open_dataset(f"mnist:{tmp_path}", image=(3, 14, 56))
    got, got_labels = read_all(dataset)
    assert got.shape == (len(images), 3, 14, 56)
    assert dataset.image_shape == (3, 14, 56)
    assert (len(dataset), dataset.classes) == (len(images), 10)
    np.testing.assert_array_equal(got_labels, labels)
    np.testing.assert_array_equal(got[:, 0], got[:, 2])


def test_halving_averages_and_tripling_keeps_the_middle():
    images, labels = labelled_images(3, (1, 6, 8))
    plain = ArrayDataset(images.astype(np.float32), labels)
    smaller = read_all(Resized(plain, (1, 3, 4)))[0]
    blocks = images.reshape(3, 1, 3, 2, 4, 2)
    np.testing.assert_allclose(smaller, blocks.mean(axis=(3, 5)), rtol=1e-6)
    larger = read_all(Resized(plain, (1, 18, 24)))[0]
    np.testing.assert_allclose(larger[..., 1::3, 1::3], images, rtol=1e-5)


def test_grey_of_grey_colours_is_the_same():
    images, labels = labelled_images(3, (1, 6, 8))
    grey = ArrayDataset(np.repeat(images, 3, axis=1), labels)
    np.testing.assert_array_equal(read_all(Resized(grey, (1, 6, 8)))[0], images)


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 0, 8)])
def test_shapes_that_cannot_be_made(shape):
    images, labels = labelled_images(3, (3, 6, 8))
    with pytest.raises(
        ValueError, match=r"cannot be resized|must be at least 1, got 0"
    ):
        Resized(ArrayDataset(images, labels), shape)
