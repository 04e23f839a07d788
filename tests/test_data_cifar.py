import datetime
import io
import os
import pickle

import numpy as np
import pytest

from mucudnn.data import open_cifar10, open_cifar100
from mucudnn.data.cifar import read_pickled_dict
from mucudnn.errors import DataError
from tests.data_files import (
    python2_pickle,
    read_all,
    write_cifar10_binary,
    write_cifar10_pickles,
    write_cifar100,
)

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


def test_a_full_sized_file(tmp_path):
    with (tmp_path / "test_batch.bin").open("wb") as file:
        file.truncate(30_730_000)
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


def test_names_of_the_wrong_number(tmp_path):
    write_cifar10_binary(tmp_path, ROWS)
    (tmp_path / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match="expected 10 names, found 2"):
        open_cifar10(tmp_path, "test", rows=ROWS)


def test_missing_files(tmp_path):
    write_cifar10_binary(tmp_path, ROWS)
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"one of data_batch_4\.bin, data_batch_4"):
        open_cifar10(tmp_path, "train", rows=ROWS)
