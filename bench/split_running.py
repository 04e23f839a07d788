"""Steps that are really run: on noise, timed, by convolutions measured quickly."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter, process_time
from typing import Any

import numpy as np

from mucudnn.ir.graph import Graph
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import class_count
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tables import Measured
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = [
    "OPTIMIZER",
    "Told",
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


def without_gradients(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps, ready for JSON."""
    return [
        {key: value for key, value in row.items() if key != "gradients"} for row in rows
    ]
