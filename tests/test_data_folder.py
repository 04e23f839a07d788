import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st

from mucudnn.data import open_dataset, open_folder
from mucudnn.errors import DataError
from tests.data_files import read_all
from tests.examples import examples

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")


def write_image(path, color, size=(24, 16), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)


def write_folder(folder, n=5, suffix=".png"):
    for name, color in (("cat", (200, 10, 20)), ("dog", (30, 220, 40))):
        for i in range(n):
            write_image(folder / name / f"{i}{suffix}", color)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".JPEG"])
@pytest.mark.parametrize("testing", ["test", "val"])
def test_parts(tmp_path, suffix, testing):
    write_folder(tmp_path / "train", 3, suffix)
    write_folder(tmp_path / testing, 2, suffix)
    for split, n in (("train", 3), ("test", 2)):
        dataset = open_dataset(f"folder:{tmp_path}", split=split, image=(3, 8, 8))
        images, labels = read_all(dataset)
        assert dataset.classes == ("cat", "dog")
        np.testing.assert_array_equal(labels, [0] * n + [1] * n)
        assert images.shape == (2 * n, 3, 8, 8)
        means = images[[0, -1]].mean(axis=(2, 3))
        np.testing.assert_allclose(means, [(200, 10, 20), (30, 220, 40)], atol=3)


def test_one_folder_is_split_and_other_files_are_passed_over(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "README").write_text("not a class")
    train, test = (open_folder(tmp_path, s, (3, 8, 8)) for s in ("train", "test"))
    assert (len(train), len(test)) == (8, 2)
    np.testing.assert_array_equal(read_all(test)[1], [0, 1])


@pytest.mark.parametrize("size", [(40, 20), (20, 40)])
def test_the_middle_is_kept(tmp_path, size):
    """An image whose middle square is white, the rest black."""
    pixels = np.zeros((size[1], size[0]), np.uint8)
    side = min(size)
    top, left = (size[1] - side) // 2, (size[0] - side) // 2
    pixels[top : top + side, left : left + side] = 255
    path = tmp_path / "train" / "a" / "0.png"
    path.parent.mkdir(parents=True)
    Image.fromarray(pixels).save(path)
    for shape in ((1, 10, 10), (3, 20, 20), (1, 5, 5)):
        images, _ = open_folder(tmp_path, "train", shape).read([0])
        assert images.shape == (1, *shape)
        assert (images[..., 1:-1, 1:-1] == 255).all()
        assert (images > 127).all()  # a shrunken edge has some of what lies beyond
    images, _ = open_folder(tmp_path, "train", (1, size[1], size[0])).read([0])
    np.testing.assert_array_equal(images[0, 0], pixels)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    name = "0.jpg" if mode == "CMYK" else "0.png"
    write_image(tmp_path / "train" / "a" / name, None, mode=mode)
    assert open_folder(tmp_path, "train", (3, 4, 4)).read([0])[0].shape == (1, 3, 4, 4)


def test_16_bits_are_scaled(tmp_path):
    pixels = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    path = tmp_path / "train" / "a" / "0.png"
    path.parent.mkdir(parents=True)
    Image.fromarray(pixels).save(path)
    images, _ = open_folder(tmp_path, "train", (1, 16, 16)).read([0])
    np.testing.assert_array_equal(images[0, 0], np.arange(256).reshape(16, 16))


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([".png", ".jpg"]), st.floats(0, 0.9))
def test_a_truncated_image_is_named(tmp_path, suffix, share):
    write_folder(tmp_path / "train", 1, suffix)
    path = tmp_path / "train" / "dog" / f"0{suffix}"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(share * len(raw))])
    dataset = open_folder(tmp_path, "train", (3, 8, 8))
    assert len(dataset.read([0])[0]) == 1
    with pytest.raises(DataError, match=f"dog/0{suffix}: not a whole image"):
        dataset.read([len(dataset) - 1])
    path.unlink()
    (tmp_path / "train" / "cat" / f"0{suffix}").unlink()


def test_missing_folders(tmp_path):
    with pytest.raises(DataError, match="nowhere: No such file"):
        open_folder(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match="expected folders of images"):
        open_folder(tmp_path, "train")
    write_folder(tmp_path / "train")
    with pytest.raises(DataError, match="expected a folder test or val"):
        open_folder(tmp_path, "test")
    write_image(tmp_path / "test" / "zebra" / "0.png", (0, 0, 0))
    with pytest.raises(DataError, match="zebra: a class that the training part lacks"):
        open_folder(tmp_path, "test")
    with pytest.raises(ValueError, match=r"\(3, H, W\) or \(1, H, W\)"):
        open_folder(tmp_path, "train", (2, 8, 8))


def test_labels_follow_the_training_part(tmp_path):
    write_folder(tmp_path / "train")
    write_image(tmp_path / "test" / "dog" / "0.png", (0, 0, 0))
    dataset = open_folder(tmp_path, "test", (3, 8, 8))
    assert dataset.classes == ("cat", "dog")
    assert dataset.read([0])[1] == [1]


def test_without_pillow(tmp_path, monkeypatch):
    write_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="pip install pillow"):
        open_folder(tmp_path, "train")
