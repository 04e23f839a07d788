import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st

from mucudnn.data import ArrayDataset, Subset, open_arrays, open_dataset
from mucudnn.data.dataset import split_indices
from mucudnn.errors import DataError
from tests.data_files import read_all, write_npy
from tests.examples import examples


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, ">f4", np.float16])
def test_both_parts(tmp_path, dtype):
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


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match=r"images\.npy: No such file"):
        open_arrays(tmp_path, "train")
    write_npy(tmp_path, "train_")
    with pytest.raises(DataError, match=r"test_images\.npy: No such file"):
        open_arrays(tmp_path, "test")


@pytest.mark.parametrize("indices", [[4], [-1], [0.5], [[0]], [0, 2**40]])
def test_indices_outside(indices):
    dataset = ArrayDataset(np.zeros((4, 1, 2, 2), np.uint8), np.arange(4))
    for each in (dataset, Subset(dataset, [0, 1, 2, 3])):
        with pytest.raises(IndexError):
            each.read(indices)


def test_no_indices_give_an_empty_batch():
    dataset = ArrayDataset(np.zeros((4, 1, 2, 2), np.uint8), np.arange(4))
    images, labels = dataset.read([])
    assert (images.shape, labels.shape) == ((0, 1, 2, 2), (0,))
