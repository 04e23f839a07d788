"""Networks and benchmark sets, as lists of their convolutions.

Each is a CSV file in this folder, read like any other. A network lists every distinct
shape once, with the number of its occurrences as `count`.
"""

from importlib.resources import files

from mucudnn.arguments import check_choice
from mucudnn.suites.layers import (
    Layer,
    parse_problem,
    read_layers,
    read_layers_file,
    short_name,
)

__all__ = [
    "SUITES",
    "Layer",
    "load_suite",
    "parse_problem",
    "read_layers_file",
    "short_name",
]

SUITES = {
    "alexnet": "AlexNet in one tower, as µ-cuDNN times it (N=256)",
    "vgg16": "VGG-16 (N=64)",
    "resnet18": "ResNet-18 (N=128)",
    "resnet50": "ResNet-50 (N=64)",
    "unet3d": "the 3x3x3 convolutions of a 3-D U-Net on 64³ voxels (N=4)",
    "deepbench_train": "DeepBench, training",
    "deepbench_inference": "DeepBench, inference on a server",
}
"""Name -> description."""


def load_suite(name: str) -> tuple[Layer, ...]:
    """Return the layers of a suite, all forward.

    Raises:
        ValueError: The name is unknown; the message lists the known ones.
    """
    check_choice("suite", name, SUITES)
    text = files(__package__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return read_layers(text.splitlines(keepends=True), name, f"{name}.csv")
