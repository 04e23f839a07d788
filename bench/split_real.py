"""`python -m bench split real`: steps in slices, beside the unbounded one, really run.

The budget is a share of what the unbounded step needs beside parameters and state, and
holds these as well. Both trainers take their steps in turns on the same batches, so
that both see the same machine: what is told are ratios. Convolutions that were measured
are remembered in the user's cache: a run that was stopped goes on from there.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from bench.machine import describe
from bench.table import render
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.sizes import format_bytes
from mucudnn.models import class_count, get_model
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.table_filler import Measured
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = [
    "OPTIMIZER",
    "Told",
    "compared",
    "gradient_distance",
    "main",
    "measured_by",
    "steps_of",
    "taken",
    "without_gradients",
]

OPTIMIZER = Momentum(learning_rate=1e-3)
_RULE = StoppingRule(min_samples=1, max_samples=5, budget_ms=60.0)
_TIME_LIMIT_S = 4.0
"""For one convolution: those of large images take long."""

_EVERY_S = 10.0


def main(arguments: Sequence[str]) -> int:
    """Train both for some steps, print what came of it and JSON of it."""
    parser = argparse.ArgumentParser(prog="python -m bench split real")
    parser.add_argument("--model", default="resnet50", help="a network with a loss")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=224, help="a side")
    parser.add_argument("--share", type=Fraction, default=Fraction(1, 15))
    parser.add_argument("--split", default="4", help="slices, height:16, or auto")
    parser.add_argument("--steps", type=int, default=4, help="of each; one warms up")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    network = get_model(options.model)(options.batch, image=options.image)
    split = int(options.split) if options.split.isdecimal() else options.split
    found = compared(network, float(options.share), split, options.steps)
    about = {key: getattr(options, key) for key in ("model", "batch", "image", "split")}
    result = about | {"share": str(options.share)} | found
    print(_table(result), flush=True)
    if options.json is not None:
        text = json.dumps({"machine": describe(), **result}, indent=1)
        options.json.write_text(text + "\n")
    return 0


def compared(
    network: Graph, share: float, split: str | int, steps: int
) -> dict[str, Any]:
    """Steps within a share of the unbounded step's activations, beside that one's.

    Returns:
        Bytes, predicted and measured times, losses, and how far gradients of the first
        step are apart; ready for JSON.
    """
    tell = Told()
    with (
        measured_by(tell) as tuner,
        Trainer(network, tuner=tuner, optimizer=OPTIMIZER) as whole,
    ):
        tell(f"unbounded: {format_bytes(whole.peak_bytes)}")
        state = sum(spec.nbytes for spec in whole.graph.with_role(*PERSISTENT))
        activations = whole.peak_bytes - state
        budget = int(share * activations)
        begun = perf_counter(), process_time()
        with Trainer(
            network,
            tuner=tuner,
            optimizer=OPTIMIZER,
            budget=MemoryBudget(nbytes=budget),
            split=split,
            progress=tell.node,
        ) as bounded:
            seconds = perf_counter() - begun[0], process_time() - begun[1]
            tell(f"in parts: {format_bytes(bounded.peak_bytes)}")
            pairs = zip(
                steps_of(whole, network, steps, tell),
                steps_of(bounded, network, steps, tell),
                strict=True,
            )
            one, other = zip(*pairs, strict=True)
            return {
                "state_bytes": state,
                "activation_bytes": activations,
                "budget": budget,
                "planning_s": seconds[0],
                "planning_cpu_s": seconds[1],
                **taken(bounded),
                "gradient_distance": gradient_distance(one[0], other[0]),
                "speed": _ratio(one, other, "wall_ms"),
                "cpu_speed": _ratio(one, other, "cpu_ms"),
                "unbounded": without_gradients(one),
                "bounded": without_gradients(other),
                "load": os.getloadavg()[0],
            }


def taken(bounded: Trainer) -> dict[str, Any]:
    """What a trainer takes, and what was predicted."""
    if bounded.placed is None:
        raise TypeError("the step has no budget")
    plan = bounded.placed.plan
    return {
        "peak_bytes": bounded.peak_bytes,
        "predicted_ms": plan.prediction.step_ms,
        "recomputed_nodes": plan.recomputed,
        "offloaded_bytes": plan.prediction.out_bytes,
        "segments": [str(segment) for segment in bounded.segments],
    }


class Told:
    """Lines of progress on standard error, with the seconds since the beginning."""

    def __init__(self) -> None:
        self._begun = self._last = perf_counter()

    def __call__(self, words: str) -> None:
        """Tell."""
        self._last = perf_counter()
        print(f"  {self._last - self._begun:.0f} s: {words}", file=sys.stderr)

    def node(self, name: str, done: int, of: int) -> None:
        """Tell of a node that was measured, now and then."""
        self.seldom(f"{name}, {done} of {of}")

    def seldom(self, words: str) -> None:
        """Tell if nothing was told for some time."""
        if perf_counter() - self._last > _EVERY_S:
            self(words)


def measured_by(tell: Told, workspace: int = 64 << 20) -> Tuner:
    """A tuner that measures convolutions as they are, quickly, and remembers them."""

    def measured(done: Measured) -> None:
        shapes = done.problem.x_shape, done.problem.w_shape
        tell.seldom(f"{done.problem.direction.value} {shapes}: {done.algo}")

    return Tuner(
        backend="cpu",
        workspace_limit=workspace,
        batch_policy="undivided",
        validate=False,
        rule=_RULE,
        time_limit_s=_TIME_LIMIT_S,
        progress=measured,
    )


def steps_of(
    trainer: Trainer, network: Graph, steps: int, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Steps on noise, the same for every trainer: loss, times, and first gradients."""
    image, label = (network.tensors[name] for name in ("image", "label"))
    classes = class_count(network) or 2
    for number in range(steps):
        rng = np.random.default_rng(number)
        images = rng.standard_normal(image.shape, dtype="f4")
        labels = rng.integers(0, classes, label.shape)
        wall, cpu = perf_counter(), process_time()
        row: dict[str, Any] = {"loss": float(trainer.step(images, labels).loss)}
        row |= {"wall_ms": 1e3 * (perf_counter() - wall)}
        row |= {"cpu_ms": 1e3 * (process_time() - cpu)}
        tell(f"{trainer!r}: loss {row['loss']:.7f}, {row['wall_ms']:.0f} ms")
        if number == 0:  # momentum is then the gradient
            names = [name for name in trainer.state if name.endswith(":momentum")]
            row["gradients"] = trainer.state.save(names)
        yield row


def gradient_distance(
    wanted: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, float]:
    """How far gradients of two first steps are apart, relative to the first ones.

    Returns:
        Of all parameters together, and the median and the largest of single ones.
    """
    pairs = [
        (gradient.astype("f8"), found["gradients"][name].astype("f8"))
        for name, gradient in wanted["gradients"].items()
    ]
    apart = np.array([np.linalg.norm(other - one) for one, other in pairs])
    lengths = np.array([np.linalg.norm(one) for one, _ in pairs])
    return {
        "all": float(np.linalg.norm(apart) / np.linalg.norm(lengths)),
        "median": float(np.median(apart / lengths)),
        "largest": float(np.max(apart / lengths)),
    }


def _ratio(
    whole: Sequence[Mapping[str, Any]], bounded: Sequence[Mapping[str, Any]], key: str
) -> float:
    """The unbounded step's time over the bounded one's: medians, warm if there are."""
    one, other = (
        statistics.median(float(row[key]) for row in rows[1:] or rows)
        for rows in (whole, bounded)
    )
    return one / other


def without_gradients(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps, ready for JSON."""
    return [
        {key: value for key, value in row.items() if key != "gradients"} for row in rows
    ]


def _table(result: Mapping[str, Any]) -> str:
    head = ("", "step", "loss", "ms", "CPU ms")
    rows = [
        (which, i, f"{row['loss']:.7f}", row["wall_ms"], row["cpu_ms"])
        for which in ("unbounded", "bounded")
        for i, row in enumerate(result[which])
    ]
    return (
        f"{result['model']}, {result['batch']} images of {result['image']}: "
        f"{format_bytes(result['peak_bytes'])} of {format_bytes(result['budget'])} in "
        f"all, {result['share']} of {format_bytes(result['activation_bytes'])} of "
        f"activations (and {format_bytes(result['state_bytes'])} of state)\n"
        f"{render(head, rows)}\n"
        f"predicted {result['predicted_ms']:.0f} ms; {result['speed']:.0%} of the "
        f"unbounded speed ({result['cpu_speed']:.0%} in CPU time); gradients of the "
        f"first step are {result['gradient_distance']['all']:.1e} apart"
    )
