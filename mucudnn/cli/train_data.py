"""Load a network and its data set, and check that they match."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn import data
from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.cli.own_code import network
from mucudnn.data.loader import PartOfBatches
from mucudnn.ir.graph import Graph
from mucudnn.models import LABEL, FunctionModel

_SAMPLE = 512
"""Number of images from which mean and standard deviation are estimated."""

_SHIFT = 8
"""Images are shifted by up to 1 / 8 of their size: 4 pixels of 32."""

_STEPS = 100


@dataclass(frozen=True, slots=True)
class Work:
    """Networks and data of a training; `words` identify it in a checkpoint."""

    training: Graph
    evaluation: Graph
    batches: data.Loader | PartOfBatches
    test: data.Loader
    words: Mapping[str, Any]


def work_of(name: str, settings: Mapping[str, Any], images: int | None = None) -> Work:
    """Load networks and data; `images` overrides the networks' batch size."""
    batch, parts, seed = settings["batch"], settings["accumulate"], settings["seed"]
    own = batch // parts if images is None else images
    if batch % parts:
        raise BadInputError(
            f"a batch of {batch} does not divide into {parts} equal parts"
        )
    with bad_input():
        model = network(name)
        image = _image(name, model.image, settings["image"])
        # A network of a fixed number of classes sets that of synthetic data.
        wanted = settings["classes"]
        if wanted is None and isinstance(model, FunctionModel) and not model.flexible:
            wanted = model.classes
        spec = _complete_spec(settings["data"], {**settings, "classes": wanted}, batch)
        train, test = (
            data.open_dataset(spec, split=split, image=image, seed=seed)
            for split in ("train", "test")
        )
        classes = _classes(train, settings["classes"])
        training, evaluation = (
            model(
                own,
                image=image,
                classes=classes,
                dtype=settings["dtype"],
                training=flag,
                seed=seed,
            )
            for flag in (True, False)
        )
        if len(training.tensors[LABEL].shape) > 1:
            raise BadInputError(
                f"{name} needs a class for each pixel; {settings['data']} has one for "
                "each image"
            )
        # Mean 0 and deviation 1, estimated from a sample.
        every = range(0, len(train), -(-len(train) // _SAMPLE))
        normalize = data.Normalize.of(data.Subset(train, every), settings["dtype"])
        augment: tuple[data.Transform, ...] = ()
        if settings["augment"]:
            augment = data.RandomCrop(max(1, image[1] // _SHIFT)), data.RandomFlip()
        batches = data.Loader(
            train,
            batch,
            seed=seed,
            transform=data.Compose((*augment, normalize)),
            drop_last=True,
        )
        tests = data.Loader(test, own, shuffle=False, transform=normalize)
    words = {
        "model": name,
        "image": image,
        "classes": classes,
        "dtype": settings["dtype"],
        "data": spec,
        "images": len(train),
        "batch": batch,
        "accumulate": parts,
        "augment": settings["augment"],
        "seed": seed,
    }
    return Work(training, evaluation, batches, tests, words)


def _image(
    name: str, own: tuple[int, ...], asked: tuple[int, ...] | None
) -> tuple[int, int, int]:
    if len(own) != 3:
        raise BadInputError(
            f"{name} takes images of {len(own) - 1} dimensions; data sets have 2"
        )
    channels, *_ = own
    match asked or own:
        case (side,):
            return channels, side, side
        case (height, width):
            return channels, height, width
        case (channels, height, width):
            return channels, height, width
    raise BadInputError(f"an image has at most 3 sizes, got {asked}")


def _complete_spec(spec: str, settings: Mapping[str, Any], batch: int) -> str:
    """Add the requested length and classes to a synthetic data set."""
    name, _, argument = spec.partition(":")
    if name != "synthetic":
        return spec
    parts = [argument] if argument else []
    if not argument:
        parts.append(f"length={batch * (settings['steps'] or _STEPS)}")
    if settings["classes"] and "classes=" not in argument:
        parts.append(f"classes={settings['classes']}")
    return f"{name}:{','.join(parts)}"


def _classes(dataset: data.Dataset, asked: int | None) -> int:
    found = data.class_count(dataset)
    if asked is None:
        return max(2, found)
    if asked < found:
        raise BadInputError(
            f"--classes {asked} is too few: the data set has {found} classes"
        )
    return asked
