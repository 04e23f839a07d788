"""Open data sets by name, as `--data` does."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mucudnn.arguments import an_integer, of_type
from mucudnn.data.arrays import open_arrays
from mucudnn.data.cifar import open_cifar10, open_cifar100
from mucudnn.data.dataset import Dataset, Split, checked_shape, checked_split
from mucudnn.data.digits import open_digits
from mucudnn.data.folder import open_folder
from mucudnn.data.mnist import open_mnist
from mucudnn.data.resized import Resized
from mucudnn.data.synthetic import SyntheticDataset

__all__ = ["FORMATS", "open_dataset"]

_DIR = ":DIR"
_LENGTH = 50_000
_LONGEST = 20
_FOLDER_SHAPE = (3, 224, 224)
_SYNTHETIC_SHAPE = (3, 32, 32)


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
    shape = image or _SYNTHETIC_SHAPE
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
                path, split, image or _FOLDER_SHAPE
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
    an_integer("seed", seed)
    if image is not None:
        image = checked_shape("image", image)
    of_type("the name of a data set", spec, str, "a string")
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
