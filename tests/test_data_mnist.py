import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st

from mucudnn.data import open_dataset, open_mnist
from mucudnn.errors import DataError
from tests.data_files import idx, read_all, write_mnist
from tests.examples import examples


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_reads_what_was_written(tmp_path, split, mark, packed):
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
def test_foreign_files(tmp_path, name, change, message):
    rewrite(tmp_path, name, change)
    with pytest.raises(DataError, match=f"{name}, {message}"):
        open_mnist(tmp_path, "train")


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte, .* none of them"):
        open_mnist(tmp_path, "train")
    with pytest.raises(DataError, match="no such folder"):
        open_mnist(tmp_path / "nowhere", "train")
