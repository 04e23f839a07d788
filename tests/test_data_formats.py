import datetime
import functools
import io
import os
import pickle
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st

from mucudnn.data import (
    FORMATS,
    ArrayDataset,
    Resized,
    Subset,
    SyntheticDataset,
    open_arrays,
    open_cifar10,
    open_cifar100,
    open_dataset,
    open_digits,
    open_mnist,
)
from mucudnn.data.cifar import read_pickled_dict
from mucudnn.data.dataset import split_indices
from mucudnn.errors import DataError
from tests.commands import python
from tests.data_files import (
    idx,
    labelled_images,
    python2_pickle,
    read_all,
    write_cifar10_binary,
    write_cifar10_pickles,
    write_cifar100,
    write_mnist,
    write_npy,
)
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


def test_synthetic_labels_can_be_learned_but_with_noise_or_of_another_seed():
    def opened(more, split="test", **options):
        name = f"synthetic:length=1500{more}"
        return open_dataset(name, split=split, image=(1, 16, 16), **options)

    train = opened("", "train")
    assert accuracy(train, opened("")) > 0.95
    assert accuracy(train, opened(",noise=100")) < 0.5
    assert accuracy(train, opened("", seed=1)) < 0.5


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


def test_bad_split_and_seed_and_the_formats_there_are():
    with pytest.raises(ValueError, match="choose train or test"):
        open_dataset("synthetic", split="validation")
    with pytest.raises(ValueError, match="seed must be at least 0"):
        open_dataset("synthetic", seed=-1)
    assert ", ".join(FORMATS) == (
        "digits, mnist:DIR, cifar10:DIR, cifar100:DIR, folder:DIR, arrays:DIR, "
        "synthetic[:length=N,classes=N,noise=X]"
    )


def test_digits():
    """They do not need scikit-learn once its file is found."""
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    train, test = (open_dataset("digits", split=s) for s in ("train", "test"))
    assert len(train) + len(test) == 1797
    assert abs(len(test) / 1797 - 0.2) < 0.005
    assert train.image_shape == (1, 8, 8)
    assert read_all(train)[0].max() == 255
    assert accuracy(train, test) > 0.9
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
    grey = ArrayDataset(np.repeat(images, 3, axis=1), labels)
    np.testing.assert_array_equal(read_all(Resized(grey, (1, 6, 8)))[0], images)


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 0, 8)])
def test_shapes_that_cannot_be_made(shape):
    images, labels = labelled_images(3, (3, 6, 8))
    with pytest.raises(
        ValueError, match=r"cannot be resized|must be at least 1, got 0"
    ):
        Resized(ArrayDataset(images, labels), shape)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, ">f4", np.float16])
def test_both_parts_of_arrays(tmp_path, dtype):
    for split, n in (("train", 12), ("test", 5)):
        images, labels = write_npy(tmp_path, f"{split}_", n, dtype=dtype)
        dataset = open_dataset(f"arrays:{tmp_path}", split=split)
        got_images, got_labels = read_all(dataset)
        np.testing.assert_array_equal(got_images, images)
        np.testing.assert_array_equal(got_labels, labels)
        assert got_images.dtype == (np.uint8 if dtype is np.uint8 else np.float32)
        assert (dataset.classes, dataset.image_shape) == (4, (3, 6, 5))


def test_files_are_mapped_and_results_are_copies(tmp_path):
    write_npy(tmp_path, "train_")
    dataset = open_arrays(tmp_path, "train")
    assert isinstance(dataset._images, np.memmap)
    first, _ = dataset.read([3, 3])
    assert type(first) is np.ndarray
    first[:] = 0
    assert dataset.read([3])[0].any()


def test_one_part_is_split(tmp_path):
    images, _ = write_npy(tmp_path, shape=(6, 5))
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")
    train, test = (open_arrays(tmp_path, split) for split in ("train", "test"))
    assert len(train) + len(test) == len(images)
    assert train.classes == ("a", "b", "c", "d")
    pixels = np.concatenate([read_all(train)[0], read_all(test)[0]])
    assert {i.tobytes() for i in pixels} == {i.tobytes() for i in images}
    np.testing.assert_array_equal(np.bincount(read_all(test)[1]), [1, 1, 1, 1])


@given(st.lists(st.integers(0, 3), min_size=5, max_size=60))
def test_the_split_is_stratified(labels):
    labels = np.array(labels)
    if np.bincount(labels).max() < 5:
        with pytest.raises(DataError, match="every 5th"):
            split_indices(labels, "test", "here")
        return
    train = split_indices(labels, "train", "here")
    test = split_indices(labels, "test", "here")
    assert sorted([*train, *test]) == list(range(len(labels)))
    for label in set(labels.tolist()):
        everywhere = np.flatnonzero(labels == label)
        np.testing.assert_array_equal(test[labels[test] == label], everywhere[4::5])


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 127), st.integers(0, 255))
def test_a_damaged_header_raises_nothing_else(tmp_path, place, value):
    write_npy(tmp_path)
    path = tmp_path / "images.npy"
    raw = bytearray(path.read_bytes())
    raw[place] = value
    path.write_bytes(raw)
    try:
        open_arrays(tmp_path, "train")
    except DataError as e:
        assert str(path) in str(e)  # noqa: PT017 (either is right)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("labels", np.array([0, 1, 2, -1] * 5), r"labels\.npy, byte 152: .* found -1"),
        ("labels", np.array([0, 1, 2, 4] * 5), r"labels\.npy, byte 152: .* found 4"),
        ("labels", np.zeros(19, np.uint8), "20 integers"),
        ("labels", np.zeros(20), "1-D array of integers"),
        ("labels", np.zeros((20, 1), int), "1-D array of integers"),
        ("labels", np.array([2**63] * 20, np.uint64), "found 9223372036854775808"),
        ("images", np.zeros((20, 3), np.uint8), r"\(n, C, H, W\)"),
        ("images", np.zeros((20, 3, 4, 4), int), "uint8 or floating point"),
        ("images", np.zeros((0, 3, 4, 4)), "byte 0: expected numbers"),
        ("images", np.array([{}] * 20), "byte 0: expected numbers"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, name, array, message):
    write_npy(tmp_path)
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")
    np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(DataError, match=message):
        open_arrays(tmp_path, "train")


@pytest.mark.parametrize("indices", [[4], [-1], [0.5], [[0]], [0, 2**40]])
def test_no_indices_give_an_empty_batch_and_those_outside_none(indices):
    dataset = ArrayDataset(np.zeros((4, 1, 2, 2), np.uint8), np.arange(4))
    assert [part.shape for part in dataset.read([])] == [(0, 1, 2, 2), (0,)]
    for each in (dataset, Subset(dataset, [0, 1, 2, 3])):
        with pytest.raises(IndexError):
            each.read(indices)


def test_missing_files(tmp_path):
    def missing(opened, folder, message, split="train"):
        with pytest.raises(DataError, match=message):
            opened(folder, split)

    missing(open_arrays, tmp_path, r"images\.npy: No such file")
    missing(open_mnist, tmp_path, r"train-images-idx3-ubyte, .* none of them")
    missing(open_mnist, tmp_path / "nowhere", "no such folder")
    write_npy(tmp_path, "train_")
    missing(open_arrays, tmp_path, r"test_images\.npy: No such file", "test")
    write_cifar10_binary(tmp_path, 4)
    (tmp_path / "data_batch_4.bin").unlink()
    cifar = functools.partial(open_cifar10, rows=4)
    missing(cifar, tmp_path, r"one of data_batch_4\.bin, data_batch_4")
    (tmp_path / "batches.meta.txt").write_text("cat\ndog\n")
    missing(cifar, tmp_path, "expected 10 names, found 2", "test")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_as_it_was_written(tmp_path, split, mark, packed):
    images, labels = write_mnist(tmp_path, split, mark=mark, packed=packed)
    dataset = open_dataset(f"mnist:{tmp_path}", split=split)
    got_images, got_labels = read_all(dataset)
    np.testing.assert_array_equal(got_images, images)
    np.testing.assert_array_equal(got_labels, labels)
    assert got_images.dtype == np.uint8
    assert got_labels.dtype == np.int64
    assert (dataset.image_shape, dataset.classes) == ((1, 28, 28), 10)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 400), st.integers(1, 255))
def test_a_changed_byte_of_a_gzip_file_is_seen(tmp_path, place, flip):
    images, _ = write_mnist(tmp_path, packed=True, n=4, side=9)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    raw = bytearray(path.read_bytes())
    place = 10 + place % (len(raw) - 10)  # flags and times of the header are free
    raw[place] ^= flip
    path.write_bytes(raw)
    try:
        got = read_all(open_mnist(tmp_path, "train"))[0]
    except DataError as e:
        assert str(e).startswith(f"{path}, byte ")  # noqa: PT017 (either is right)
    else:  # it was one of the few bits that mean nothing
        np.testing.assert_array_equal(got, images)


def rewrite(folder, name, change):
    write_mnist(folder)
    raw = bytearray((folder / name).read_bytes())
    (folder / name).write_bytes(change(raw))


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (IMAGES, lambda raw: b"\x89PNG" + raw[4:], r"byte 0: .* found 89 50 4e 47"),
        (
            IMAGES,
            lambda raw: b"\0\0\x0d\x03" + raw[4:],
            r"byte 0: .* found 00 00 0d 03",
        ),
        (IMAGES, lambda raw: raw[:-3], r"byte 9421: .* found 3 fewer"),
        (IMAGES, lambda raw: raw + b"12345", r"byte 9424: .* found 5 more"),
        (IMAGES, lambda raw: raw[:8] + bytes(4) + raw[12:], r"byte 8: .* above 0"),
        (IMAGES, lambda raw: raw[:4] + b"\xff" * 12, r"byte 16: .* fewer"),
        (LABELS, lambda raw: raw[:11] + b"\x0a" + raw[12:], r"byte 11: .* 10 .image 3"),
        (LABELS, lambda raw: idx(np.zeros(11)), r"byte 4: expected 12 labels.* 11"),
        (LABELS, lambda raw: b"", r"byte 0: expected a header of 8 bytes"),
    ],
)
def test_foreign_files_of_mnist(tmp_path, name, change, message):
    rewrite(tmp_path, name, change)
    with pytest.raises(DataError, match=f"{name}, {message}"):
        open_mnist(tmp_path, "train")


ROWS = 4
WRITERS = {
    "binary": write_cifar10_binary,
    "python 2": write_cifar10_pickles,
    "python 3, protocol 2": lambda f, n: write_cifar10_pickles(
        f, n, lambda value: pickle.dumps(value, 2)
    ),
    "python 3, protocol 4": lambda f, n: write_cifar10_pickles(
        f, n, lambda value: pickle.dumps(value, 4)
    ),
}


@pytest.mark.parametrize("form", WRITERS)
def test_cifar10(tmp_path, form):
    images, labels = WRITERS[form](tmp_path, ROWS)
    for split, part in (("train", slice(5 * ROWS)), ("test", slice(5 * ROWS, None))):
        dataset = open_cifar10(tmp_path, split, rows=ROWS)
        got_images, got_labels = read_all(dataset)
        np.testing.assert_array_equal(got_images, images[part])
        np.testing.assert_array_equal(got_labels, labels[part])
        assert dataset.classes == tuple(f"class {i}" for i in range(10))
        assert dataset.image_shape == (3, 32, 32)


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar-10-batches-py"])
def test_the_archives_folder_is_found(tmp_path, folder):
    write = write_cifar10_binary if "bin" in folder else write_cifar10_pickles
    write(tmp_path / folder, ROWS)
    assert len(open_cifar10(tmp_path, "train", rows=ROWS)) == 5 * ROWS


@pytest.mark.parametrize("binary", [True, False])
def test_cifar100_fine_and_coarse(tmp_path, binary):
    images, fine, coarse = write_cifar100(tmp_path, 100, binary)
    for is_coarse, labels, count in ((False, fine, 100), (True, coarse, 20)):
        dataset = open_cifar100(tmp_path, "train", coarse=is_coarse, rows=100)
        got_images, got_labels = read_all(dataset)
        np.testing.assert_array_equal(got_images, images)
        np.testing.assert_array_equal(got_labels, labels)
        assert dataset.classes == count


def test_published_sizes_are_the_default(tmp_path):
    write_cifar10_binary(tmp_path, ROWS)
    with pytest.raises(DataError, match=r"expected 30730000 bytes \(10000 rows"):
        open_cifar10(tmp_path, "test")
    write_cifar100(tmp_path, ROWS, binary=True)
    with pytest.raises(DataError, match=r"expected 153700000 bytes \(50000 rows"):
        open_cifar100(tmp_path, "train")
    os.truncate(tmp_path / "test_batch.bin", 30_730_000)
    assert len(open_cifar10(tmp_path, "test")) == 10_000


def test_label_out_of_range(tmp_path):
    write_cifar10_binary(tmp_path, ROWS)
    path = tmp_path / "data_batch_2.bin"
    raw = bytearray(path.read_bytes())
    raw[2 * 3073] = 10
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"2\.bin, byte 6146: .* 0 to 9, found 10"):
        open_cifar10(tmp_path, "train", rows=ROWS)


@pytest.mark.parametrize(("coarse", "column"), [(False, 1), (True, 0)])
def test_cifar100_label_out_of_range(tmp_path, coarse, column):
    write_cifar100(tmp_path, ROWS, binary=True)
    path = tmp_path / "train.bin"
    raw = bytearray(path.read_bytes())
    raw[3 * 3074 + column] = 200
    path.write_bytes(raw)
    offset = 3 * 3074 + column
    with pytest.raises(DataError, match=rf"byte {offset}: .* found 200 \(image 3\)"):
        open_cifar100(tmp_path, "train", coarse=coarse, rows=ROWS)


def pickled(**changes):
    value = {"data": np.zeros((ROWS, 3072), np.uint8), "labels": [0] * ROWS}
    return python2_pickle({**value, **changes})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (pickled(labels=[0, 1, 2, -1]), r"labels from 0 to 9 .* found -1 \(image 3\)"),
        (pickled(labels=[0, 1, 2, None]), r"found None \(image 3\)"),
        (pickled(labels=[0]), r"expected 4 entries in 'labels', found 1"),
        (pickled(labels=3), r"expected an array 'data' and a list 'labels', found"),
        (pickled(data=np.zeros((4, 3), np.uint8)), r"\(4, 3072\), found \(4, 3\)"),
        (pickled(data=np.zeros((4, 3072))), r"elements of type b'f8'"),
        (python2_pickle([1, 2]), "expected a pickled dictionary, found list"),
        (python2_pickle({}), "found nothing"),
        (pickled() + b"more", "the end of the file, found 4 more bytes"),
        (b"not a pickle", "byte 1: expected a pickle"),
    ],
)
def test_foreign_pickles(tmp_path, raw, message):
    path = tmp_path / "test_batch"
    path.write_bytes(raw)
    with pytest.raises(
        DataError, match=rf"test_batch, byte \d+: .*{message}|{message}"
    ):
        open_cifar10(tmp_path, "test", rows=ROWS)


class Malicious:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    "value",
    [
        Malicious(os.mkdir, "made"),
        Malicious(eval, "open('made', 'w')"),
        Malicious(getattr, "", "upper"),
        np.dtype,
        np.array([{}], dtype=object),
        datetime.date(2020, 1, 1),
        io.StringIO,
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickles_run_nothing(tmp_path, monkeypatch, value, protocol):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "test_batch"
    if value is np.dtype:  # admitted as a name, answered by a stand-in
        path.write_bytes(pickle.dumps({"data": value, "labels": []}, protocol))
        assert read_pickled_dict(path)["data"] is not np.dtype
        return
    path.write_bytes(pickle.dumps({"data": value}, protocol))
    with pytest.raises(DataError, match="test_batch, byte"):
        read_pickled_dict(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["test_batch"]


@pytest.mark.parametrize("name", ["numpy\nndarray", "numpy\ndtype", "_codecs\nencode"])
def test_a_pickle_cannot_change_the_stand_ins(tmp_path, name):
    path = tmp_path / "test_batch"
    state = b"}U\x05valueK\x01s"
    path.write_bytes(b"\x80\x02}U\x01ac" + name.encode() + b"\n" + state + b"bs.")
    with pytest.raises(DataError):
        read_pickled_dict(path)
