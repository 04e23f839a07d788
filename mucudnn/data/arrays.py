"""Images and labels in NumPy arrays or folders, in memory or mapped.

A mapped file takes no memory: `read` touches only the pages of the images it returns.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import check_integer, check_path, check_text
from mucudnn.data.dataset import (
    Dataset,
    Images,
    Indices,
    Labels,
    Split,
    Subset,
    checked_indices,
    checked_split,
    split_indices,
)
from mucudnn.data.files import (
    check_labels,
    check_length,
    data_error,
    read_file,
    readable,
    shown,
)
from mucudnn.errors import DataError
from mucudnn.files import check_file

_MOST_NAMES = 1 << 24  # bytes
_MOST_CLASSES = 2**31 - 1


class ArrayDataset:
    """A data set of arrays.

    Args:
        images: (n, C, H, W), or (n, H, W) for one channel; uint8 is kept, floating
            point is read as float32.
        labels: (n,), whole numbers from 0.
        classes: Names or number of classes; None derives the number from the largest
            label.

    Raises:
        ValueError: The arrays do not fit together, or a label is out of range.
    """

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[Any],
        classes: tuple[str, ...] | int | None = None,
    ) -> None:
        images, labels = _array("images", images), _array("labels", labels)
        if images.ndim == 3:
            images = images[:, None]
        if images.ndim != 4 or 0 in images.shape:
            raise ValueError(
                "images must have the shape (n, C, H, W) or (n, H, W), none of them 0; "
                f"got {images.shape}"
            )
        if images.dtype != np.uint8 and images.dtype.kind != "f":
            raise ValueError(
                f"images must be uint8 or floating point, got {images.dtype}"
            )
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            raise ValueError(
                f"labels must be {len(images)} integers, one per image; got an array "
                f"of shape {labels.shape} and type {labels.dtype}"
            )
        # Class names, their number, or as many as the labels show.
        if classes is None:
            classes = int(labels.max()) + 1
        elif isinstance(classes, tuple | list):
            classes = tuple(check_text("a class", name) for name in classes)
        else:
            classes = check_integer("classes", classes, least=1)
        count = classes if isinstance(classes, int) else len(classes)
        if int(labels.min()) < 0 or int(labels.max()) >= count:
            raise ValueError(
                f"labels must be from 0 to {count - 1}; they range from "
                f"{labels.min()} to {labels.max()}"
            )
        self.classes = classes
        self.image_shape: tuple[int, int, int] = images.shape[1:]
        self._images = images
        self._labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, indices: Indices) -> tuple[Images, Labels]:
        """See `Dataset.read`."""
        chosen = checked_indices(indices, len(self))
        images = np.asarray(self._images[chosen])
        if images.dtype != np.uint8:
            images = images.astype(np.float32, copy=False)
        return images, self._labels[chosen]


def _array(name: str, values: Any) -> NDArray[Any]:
    try:
        return np.asanyarray(values)  # a mapped file stays one
    except ValueError as e:
        raise ValueError(f"{name} must be an array, or even lists: {e}") from e


def open_arrays(folder: str | Path, split: Split) -> Dataset:
    """Open the `.npy` files of a folder, mapped to memory.

    The files are `train_images.npy`, `train_labels.npy`, and `test_…` likewise; or else
    `images.npy` and `labels.npy`, where every fifth image of a class is for testing.
    `classes.txt` may name the classes, one per line.

    Raises:
        DataError: The files are missing, damaged, or do not fit together.
    """
    folder = check_path("folder", folder)
    checked_split(split)
    parts = [p for p in ("train_", "test_") if (folder / f"{p}images.npy").is_file()]
    prefix = f"{split}_" if parts else ""
    images_path = folder / f"{prefix}images.npy"
    labels_path = folder / f"{prefix}labels.npy"
    images, labels = _map(images_path), _labels(labels_path)
    # Both parts have the classes that the labels of either show.
    count = max(int(_labels(folder / f"{p}labels.npy").max()) for p in parts or [""])
    names = _class_names(folder / "classes.txt")
    if names is not None:
        _labels(labels_path, len(names))
    try:
        whole = ArrayDataset(images, labels, names or count + 1)
    except ValueError as e:
        raise DataError(f"{images_path} with {labels_path.name}: {e}") from e
    if parts:
        return whole
    return Subset(whole, split_indices(labels, split, str(labels_path)))


def _labels(path: Path, classes: int = _MOST_CLASSES) -> NDArray[Any]:
    labels = _map(path)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: expected a 1-D array of integers, found one of shape "
            f"{labels.shape} and type {labels.dtype}"
        )
    check_labels(path, labels, classes, labels.offset, labels.itemsize)
    return labels


def _map(path: Path) -> "np.memmap[Any, Any]":
    """Map a `.npy` file."""
    wanted = "numbers in the .npy format"
    with readable(path):
        check_file(path)  # reading a FIFO may never end
        try:
            array = np.lib.format.open_memmap(path, "r")
        except OSError:
            raise
        except Exception as e:  # parsers of the Python literal in it raise anything
            raise data_error(path, 0, wanted, shown(str(e))) from e
        size = path.stat().st_size
    what = f"{array.dtype} of shape {array.shape}"
    if not array.nbytes or array.ndim == 0:
        raise data_error(path, 0, wanted, what)
    check_length(path, size, array.offset + array.nbytes, what)
    return array


def _class_names(path: Path) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    try:
        text = read_file(path, _MOST_NAMES).decode()
    except UnicodeDecodeError as e:
        raise data_error(path, e.start, "UTF-8 text", e.reason) from e
    return tuple(line.strip() for line in text.splitlines() if line.strip())


# Folders of image files, one per class, decoded when they are read.
#
# Pillow is imported when a folder is opened.


_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})
_MODES = {1: "L", 3: "RGB"}
_PARTS = {"train": ("train",), "test": ("test", "val")}


class FolderDataset:
    """Image files, scaled to cover a size and center-cropped.

    Args:
        files: (path, label) of each image.
        classes: Names of the classes.
        image_shape: (C, H, W); C is 3 for RGB or 1 for luminance.

    Raises:
        ValueError: `image_shape` is not valid.
        DataError: Pillow is not installed.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, int]],
        classes: tuple[str, ...],
        image_shape: tuple[int, int, int],
    ) -> None:
        if image_shape[0] not in _MODES or min(image_shape) < 1:
            raise ValueError(
                f"image files can be read as (3, H, W) or (1, H, W), not {image_shape}"
            )
        self.classes = classes
        self.image_shape = image_shape
        try:
            from PIL import Image, ImageOps
        except ImportError as e:
            raise DataError(
                "image files are read with Pillow, which is not installed; "
                "pip install pillow"
            ) from e
        self._pillow, self._crop = Image, ImageOps.fit
        self._paths = [path for path, _ in files]
        self._labels = np.array([label for _, label in files], np.int64)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, indices: Indices) -> tuple[Images, Labels]:
        """See `Dataset.read`."""
        chosen = checked_indices(indices, len(self))
        images = np.empty((len(chosen), *self.image_shape), np.uint8)
        for image, index in zip(images, chosen, strict=True):
            image[...] = self._decode(self._paths[index])
        return images, self._labels[chosen]

    def _decode(self, path: Path) -> NDArray[np.uint8]:
        channels, height, width = self.image_shape
        try:
            with self._pillow.open(path) as file:
                # JPEG only: decoding at reduced size is several times faster
                file.draft(_MODES[channels], (width, height))
                if file.mode.startswith("I"):  # 16 bits, which convert would clip
                    high = np.asarray(file).clip(0, 65535) >> 8
                    image = self._pillow.fromarray(high.astype(np.uint8))
                else:
                    image = file
                image = image.convert(_MODES[channels])
            bilinear = self._pillow.Resampling.BILINEAR
            image = self._crop(image, (width, height), bilinear)
        except Exception as e:  # decoders raise anything, SyntaxError included
            raise DataError(f"{path}: not a whole image file: {e}") from e
        return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


def open_folder(
    folder: str | Path, split: Split, image_shape: tuple[int, int, int] = (3, 224, 224)
) -> Dataset:
    """Open the `.jpg` and `.png` files of `DIR/train/CLASS/` and `DIR/test/CLASS/`.

    `val` may stand for `test`. Without such folders, DIR itself has the folders of the
    classes, and every fifth image of a class is for testing. Labels number the classes
    in alphabetical order.

    Raises:
        DataError: There are no such files, or Pillow is not installed.
        ValueError: `image_shape` is not (1 or 3, H, W).
    """
    folder = check_path("folder", folder)
    checked_split(split)
    parts = {name for names in _PARTS.values() for name in names}
    if not any((folder / part).is_dir() for part in parts):
        files, classes = _list_files(folder, None)
        whole = FolderDataset(files, classes, image_shape)
        labels = np.array([label for _, label in files])
        return Subset(whole, split_indices(labels, split, str(folder)))
    for name in _PARTS[split]:
        if (folder / name).is_dir():
            train = folder / "train"
            known = _folders(train) if train.is_dir() and split == "test" else None
            files, classes = _list_files(folder / name, known)
            return FolderDataset(files, classes, image_shape)
    raise DataError(f"{folder}: expected a folder {' or '.join(_PARTS[split])}")


def _list_files(
    folder: Path, known: tuple[str, ...] | None
) -> tuple[list[tuple[Path, int]], tuple[str, ...]]:
    """Return (path, label) of all files, and the classes: `known` or all found."""
    found = _folders(folder)
    classes = found if known is None else known
    foreign = sorted(set(found) - set(classes))
    if foreign:
        raise DataError(f"{folder / foreign[0]}: a class that the training part lacks")
    files = []
    for name in found:
        # No FIFOs, which may never end.
        with readable(folder / name), os.scandir(folder / name) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file())
        paths = (folder / name / file for file in names)
        label = classes.index(name)
        files += [(path, label) for path in paths if path.suffix.lower() in _SUFFIXES]
    if not files:
        raise DataError(
            f"{folder}: expected folders of images, one per class "
            f"({', '.join(sorted(_SUFFIXES))}); found none"
        )
    return files, classes


def _folders(folder: Path) -> tuple[str, ...]:
    with readable(folder):
        return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
