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
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from bench.machine import describe
from bench.split_distance import distances, exact_step
from bench.split_running import (
    OPTIMIZER,
    Told,
    measured_by,
    steps_of,
    taken,
    without_gradients,
)
from bench.table import render
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.sizes import format_bytes
from mucudnn.models import get_model
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer

__all__ = ["compared", "main"]


def main(arguments: Sequence[str]) -> int:
    """Train both for some steps, print what came of it and JSON of it."""
    parser = argparse.ArgumentParser(prog="python -m bench split real")
    parser.add_argument("--model", default="resnet50", help="a network with a loss")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=224, help="a side")
    parser.add_argument("--share", type=Fraction, default=Fraction(1, 15))
    parser.add_argument("--split", default="4", help="slices, height:16, or auto")
    parser.add_argument("--steps", type=int, default=4, help="of each; one warms up")
    parser.add_argument("--float64", action="store_true", help="gradients beside it")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    model = partial(get_model(options.model), options.batch, image=options.image)
    exact = model(dtype="float64") if options.float64 else None
    split = int(options.split) if options.split.isdecimal() else options.split
    found = compared(model(), float(options.share), split, options.steps, exact)
    about = {key: getattr(options, key) for key in ("model", "batch", "image", "split")}
    result = about | {"share": str(options.share)} | found
    print(_table(result), flush=True)
    if options.json is not None:
        text = json.dumps({"machine": describe(), **result}, indent=1)
        options.json.write_text(text + "\n")
    return 0


def compared(
    network: Graph,
    share: float,
    split: str | int,
    steps: int,
    exact: Graph | None = None,
) -> dict[str, Any]:
    """Steps within a share of the unbounded step's activations, beside that one's.

    Args:
        network: A network with a loss.
        share: Of the activations, the budget.
        split: How the bounded step is split.
        steps: Of each.
        exact: The same network in float64, whose gradients both are held against.

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
        precise = exact_step(exact, whole.state.save(), tuner, tell)
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
                **distances(one[0], other[0], precise),
                "speed": _ratio(one, other, "wall_ms"),
                "cpu_speed": _ratio(one, other, "cpu_ms"),
                "unbounded": without_gradients(one),
                "bounded": without_gradients(other),
                "load": os.getloadavg()[0],
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
