"""Data sets by name: what `--data` accepts."""

import io
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import check_integer, check_number, check_path, check_type
from mucudnn.data.arrays import ArrayDataset, open_arrays, open_folder
from mucudnn.data.cifar import open_cifar10, open_cifar100
from mucudnn.data.dataset import (
    Dataset,
    Images,
    Indices,
    Labels,
    Resized,
    Split,
    Subset,
    checked_indices,
    checked_shape,
    checked_split,
    split_indices,
)
from mucudnn.data.files import (
    check_labels,
    check_length,
    data_error,
    find_file,
    read_file,
)
from mucudnn.errors import DataError

_CLASSES, _SIDE, _WHITE = 10, 8, 16
_MOST = 1 << 24
"""Maximum bytes of text, 60 times those of the file."""


def open_digits(split: Split, path: Path | None = None) -> Dataset:
    """Open the digits, with pixels scaled from 0-16 to 0-255.

    Every fifth image of each class is for testing. `path` replaces scikit-learn's file.

    Raises:
        DataError: scikit-learn is not installed, or the file is damaged.
    """
    checked_split(split)
    path = _installed() if path is None else check_path("path", path)
    raw = read_file(path, _MOST)
    most = np.array([_WHITE] * _SIDE**2 + [_CLASSES - 1])
    wanted = (
        f"rows of {_SIDE**2} pixels from 0 to {_WHITE} and a label below {_CLASSES}"
    )
    if not raw.strip():
        raise data_error(path, 0, wanted, "an empty file")
    try:
        table = np.loadtxt(io.BytesIO(raw), np.int64, delimiter=",", ndmin=2)
    except ValueError as e:
        raise data_error(path, 0, wanted, str(e)) from e
    if table.shape[1:] != most.shape or ((table < 0) | (table > most)).any():
        found = (
            f"{table.shape[1]} numbers in a row, from {table.min()} to {table.max()}"
        )
        raise data_error(path, 0, wanted, found)
    pixels = np.rint(table[:, :-1] * (255 / _WHITE)).astype(np.uint8)
    whole = ArrayDataset(pixels.reshape(-1, 1, _SIDE, _SIDE), table[:, -1], _CLASSES)
    return Subset(whole, split_indices(table[:, -1], split, str(path)))


def _installed() -> Path:
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "the digits are a file of scikit-learn, which is not installed; "
            "pip install scikit-learn"
        )
    package = Path(spec.submodule_search_locations[0])
    return package / "datasets" / "data" / "digits.csv.gz"


# MNIST and data sets of the same form (Fashion-MNIST, KMNIST): IDX files.
#
# An IDX file is a big-endian header (two zero bytes, the element type, the number of
# dimensions, each dimension in 32 bits) and the elements.
#
# Source: Y. LeCun, C. Cortes and C. J. C. Burges, "The MNIST database of handwritten
# digits", section "File formats".


_PREFIX = {"train": "train", "test": "t10k"}
_UBYTE = 0x08


def open_mnist(folder: str | Path, split: Split) -> Dataset:
    """Open the published files, packed (`.gz`) or not, with `-idx` or `.idx`.

    Raises:
        DataError: A file is missing, truncated, damaged or of another kind.
    """
    folder = check_path("folder", folder)
    checked_split(split)
    images_path = find_file(folder, _names(split, "images", 3))
    labels_path = find_file(folder, _names(split, "labels", 1))
    images, _ = _read_idx(images_path, 3)
    labels, header = _read_idx(labels_path, 1)
    if len(labels) != len(images):
        expected = f"{len(images)} labels, one for each image of {images_path.name}"
        raise data_error(labels_path, 4, expected, str(len(labels)))
    check_labels(labels_path, labels, _CLASSES, header, 1)
    return ArrayDataset(images, labels, _CLASSES)


def _names(split: Split, what: str, ndim: int) -> tuple[str, ...]:
    return tuple(
        f"{_PREFIX[split]}-{what}{mark}idx{ndim}-ubyte{packed}"
        for packed in ("", ".gz")
        for mark in ("-", ".")
    )


def _read_idx(path: Path, ndim: int) -> tuple[NDArray[np.uint8], int]:
    """Return the elements of a file, and the offset of the first one."""
    header = 4 + 4 * ndim

    def stated_size(head: bytes) -> int | None:
        """Return the size that a header states; None while it is incomplete."""
        return header + math.prod(_shape(head, ndim)) if len(head) >= header else None

    raw = read_file(path, stated_size)
    magic = struct.pack(">HBB", 0, _UBYTE, ndim)
    # Compare only what there is, so that a short file is called short.
    if raw[:4] != magic[: len(raw)]:
        expected = f"{magic.hex(' ')} (unsigned bytes, {ndim}-dimensional)"
        raise data_error(path, 0, expected, raw[:4].hex(" "))
    if len(raw) < header:
        fewer = f"{header - len(raw)} fewer"
        raise data_error(path, len(raw), f"a header of {header} bytes", fewer)
    shape = _shape(raw, ndim)
    if 0 in shape:
        raise data_error(path, 4 + 4 * shape.index(0), "dimensions above 0", f"{shape}")
    size = header + math.prod(shape)
    check_length(path, len(raw), size, f"a header and {shape} elements")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape), header


def _shape(raw: bytes, ndim: int) -> tuple[int, ...]:
    return struct.unpack_from(f">{ndim}I", raw, 4)


# Learnable images generated on the fly, in any number, without files or memory.
#
# Each class has a smooth pattern, a random sum of the lowest cosines. An image is its
# class's pattern with a random brightness and pixel noise. All of it depends on the
# seed and the index only, so an index always gives the same image, in any order and on
# any thread.


_MOST_SYNTHETIC = 2**63 - 1
_WAVES = 4
_CONTRAST, _BRIGHTNESS = 32.0, 16.0
_PATTERNS, _TRAIN, _TEST = range(3)


@dataclass(frozen=True, slots=True)
class SyntheticDataset:
    """Images of class-dependent patterns in noise.

    Both splits have the same classes, but different images.

    Attributes:
        length: Number of images.
        classes: Number of classes, which alternate.
        image_shape: (C, H, W).
        noise: Standard deviation of pixel noise relative to that of the patterns.
        seed: Seed of patterns and images.
        split: Training or test images.
    """

    length: int
    classes: int = 10
    image_shape: tuple[int, int, int] = (3, 32, 32)
    noise: float = 1.0
    seed: int = 0
    split: Split = "train"

    def __post_init__(self) -> None:
        for name in ("length", "classes"):
            check_integer(name, getattr(self, name), least=1, most=_MOST_SYNTHETIC)
        check_integer("seed", self.seed, least=0)
        for size in checked_shape("image_shape", self.image_shape):
            check_integer("a size of image_shape", size, most=_MOST_SYNTHETIC)
        check_number("noise", self.noise, least=0, most=100)
        checked_split(self.split)

    def __len__(self) -> int:
        return self.length

    def read(self, indices: Indices) -> tuple[Images, Labels]:
        """See `Dataset.read`."""
        chosen = checked_indices(indices, self.length)
        labels = chosen.astype(np.int64) % self.classes
        patterns = {int(label): self._pattern(int(label)) for label in set(labels)}
        images = np.empty((len(chosen), *self.image_shape), np.uint8)
        for image, index, label in zip(images, chosen, labels, strict=True):
            image[...] = self._image(int(index), patterns[int(label)])
        return images, labels

    def _image(self, index: int, pattern: NDArray[np.float32]) -> NDArray[np.float32]:
        stream = _TEST if self.split == "test" else _TRAIN
        rng = np.random.default_rng([self.seed, stream, index])
        image = rng.standard_normal(self.image_shape, np.float32)
        image *= self.noise * _CONTRAST
        image += pattern
        image += 128 + _BRIGHTNESS * rng.uniform(-1, 1)
        return np.clip(image, 0, 255, out=image)

    def _pattern(self, label: int) -> NDArray[np.float32]:
        """Return a class's pattern, (C, H, W), of deviation `_CONTRAST`."""
        rng = np.random.default_rng([self.seed, _PATTERNS, label])
        channels, height, width = self.image_shape
        rows, columns = _cosines(height), _cosines(width)
        weights = rng.standard_normal((channels, len(rows), len(columns)))
        weights *= _CONTRAST / np.sqrt(len(rows) * len(columns))
        pattern: NDArray[np.float64] = rows.T @ weights @ columns
        return pattern.astype(np.float32)


def _cosines(size: int) -> NDArray[np.float64]:
    """Return the lowest cosines over `size` points, each of mean square 1."""
    places = (np.arange(size) + 0.5) / size
    waves = np.arange(min(_WAVES, size))[:, None]
    scale = np.where(waves == 0, 1.0, np.sqrt(2))
    return np.asarray(scale * np.cos(np.pi * waves * places))


_DIR = ":DIR"
_LENGTH = 50_000
_LONGEST = 20
_Image = tuple[int, int, int] | None


def _synthetic(argument: str, split: Split, image: _Image, seed: int) -> Dataset:
    """Open synthetic images of `length`, `classes`, `noise`; a fifth is for testing."""
    readers: dict[str, Callable[[str], Any]]
    readers = {"length": _digits, "classes": _digits, "noise": float}
    options: dict[str, Any] = {"length": _LENGTH}
    for part in filter(None, argument.split(",")):
        key, equals, text = part.partition("=")
        if not equals:
            key, text = "length", part
        if key not in readers:
            raise ValueError(
                f"synthetic images have no option {key!r}; choose from "
                f"{', '.join(readers)}, as in synthetic:length=1000,noise=0.5"
            )
        try:
            options[key] = readers[key](text)
        except ValueError:
            raise ValueError(
                f"{key} of synthetic images must be a number, got {text!r}"
            ) from None
    if split == "test":
        options["length"] = max(1, options["length"] // 5)
    shape = image or (3, 32, 32)
    return SyntheticDataset(**options, image_shape=shape, seed=seed, split=split)


def _digits(text: str) -> int:
    """Parse decimal digits.

    Only the first digits are read, which are too large for `SyntheticDataset` anyway.
    """
    number = text.strip()
    if not (number.lstrip("-").isascii() and number.lstrip("-").isdigit()):
        raise ValueError(text)
    return int(number[:_LONGEST])


_Opener = Callable[[str, Split, _Image, int], Dataset]

_OPENERS: Mapping[str, tuple[str, _Opener]] = MappingProxyType(
    {
        "digits": ("", lambda _, split, *rest: open_digits(split)),
        "mnist": (_DIR, lambda path, split, *rest: open_mnist(path, split)),
        "cifar10": (_DIR, lambda path, split, *rest: open_cifar10(path, split)),
        "cifar100": (_DIR, lambda path, split, *rest: open_cifar100(path, split)),
        "folder": (
            _DIR,
            lambda path, split, image, _: open_folder(
                path, split, image or (3, 224, 224)
            ),
        ),
        "arrays": (_DIR, lambda path, split, *rest: open_arrays(path, split)),
        "synthetic": ("[:length=N,classes=N,noise=X]", _synthetic),
    }
)

FORMATS = tuple(f"{name}{usage}" for name, (usage, _) in _OPENERS.items())
"""Usage of each kind of data set, such as `mnist:DIR`."""


def open_dataset(
    spec: str, *, split: Split = "train", image: _Image = None, seed: int = 0
) -> Dataset:
    """Open a data set by name, such as `mnist:DIR`; `FORMATS` lists all names.

    Args:
        spec: Name, and its argument after a colon.
        split: Training or test images.
        image: (C, H, W) of the images; None is the data set's own, (3, 224, 224) for
            image files and (3, 32, 32) for synthetic images. Image files are cropped to
            it, others stretched.
        seed: Seed of synthetic images.

    Raises:
        ValueError: The name, split or shape is not valid.
        DataError: Files are missing or damaged.
    """
    checked_split(split)
    check_integer("seed", seed)
    if image is not None:
        image = checked_shape("image", image)
    check_type("the name of a data set", spec, str, "a string")
    name, _, argument = spec.partition(":")
    if name not in _OPENERS:
        raise ValueError(
            f"unknown data set {name!r}; choose one of: {', '.join(FORMATS)}"
        )
    usage, opener = _OPENERS[name]
    if usage == _DIR and not argument:
        raise ValueError(f"{name} needs a folder: {name}:DIR")
    if not usage and argument:
        raise ValueError(f"{name} takes nothing after its name, got {argument!r}")
    dataset = opener(argument, split, image, seed)
    if image is None or image == dataset.image_shape:
        return dataset
    return Resized(dataset, image)
