"""Folders of image files, one per class, decoded when they are read.

Pillow is imported when a folder is opened.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import a_path
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
from mucudnn.data.files import readable
from mucudnn.errors import DataError

__all__ = ["FolderDataset", "open_folder"]

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
        self._pillow = _import_pillow()
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
            scale = max(width / image.width, height / image.height)
            wide, high = width / scale, height / scale  # of the centered crop
            left = max(0.0, (image.width - wide) / 2)
            top = max(0.0, (image.height - high) / 2)
            right, bottom = min(image.width, left + wide), min(image.height, top + high)
            box = left, top, right, bottom
            image = image.resize((width, height), self._pillow.Resampling.BILINEAR, box)
        except Exception as e:  # decoders raise anything, SyntaxError included
            raise DataError(f"{path}: not a whole image file: {e}") from e
        pixels = np.asarray(image).reshape(height, width, channels)
        return pixels.transpose(2, 0, 1)


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
    folder = a_path("folder", folder)
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
    files = [
        (path, classes.index(name))
        for name in found
        for path in _image_files(folder / name)
    ]
    if not files:
        raise DataError(
            f"{folder}: expected folders of images, one a class "
            f"({', '.join(sorted(_SUFFIXES))}); found none"
        )
    return files, classes


def _image_files(folder: Path) -> list[Path]:
    """Return the image files of a folder, but no FIFOs, which may never end."""
    with readable(folder), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_file()]
    paths = (folder / name for name in sorted(names))
    return [path for path in paths if path.suffix.lower() in _SUFFIXES]


def _folders(folder: Path) -> tuple[str, ...]:
    with readable(folder):
        return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))


def _import_pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as e:
        raise DataError(
            "image files are read with Pillow, which is not installed; "
            "pip install 'mucudnn[images]'"
        ) from e
    return Image
