"""`python -m bench papers superneurons`: one network's row, at any batch and image."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.papers.models import MODELS
from bench.papers.superneurons import row

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Print the row as JSON, or write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m bench papers superneurons")
    parser.add_argument("--model", required=True, choices=list(MODELS))
    parser.add_argument("--batch", type=_positive, default=1)
    parser.add_argument("--image", type=_positive, help="default: the paper's")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: stdout")
    options = parser.parse_args(arguments)
    make = MODELS[options.model]
    try:
        network = make() if options.image is None else make(options.image)
    except ValueError as error:
        parser.error(f"image {options.image} is too small for {options.model}: {error}")
    text = json.dumps(row(network, options.batch), indent=1)
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
