"""`python -m bench papers superneurons`: one network's row, at any batch and image."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.papers.models import network
from bench.papers.superneurons import row

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Print the row as JSON, or write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m bench papers superneurons")
    parser.add_argument(
        "--model",
        required=True,
        help="alexnet, vgg16, resnet50, resnet101, resnet152, resnet2500, inception_v4 "
        "as SuperNeurons has them, or another network of `mucudnn memory --list`",
    )
    parser.add_argument("--batch", type=_positive, default=1)
    parser.add_argument("--image", type=_positive, help="default: the paper's")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: stdout")
    options = parser.parse_args(arguments)
    try:
        made = network(options.model, options.image)
    except ValueError as error:
        parser.error(str(error))
    text = json.dumps(row(made, options.batch), indent=1)
    if options.json is None:
        print(text)
        return 0
    try:
        options.json.write_text(text + "\n")
    except OSError as error:
        parser.error(f"cannot write {options.json}: {error.strerror}")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)
