"""Ranks over MPI that really train in step, the last of them slowed.

`mpiexec -n 2 python -m bench.fleet_ranks NETWORK SLOW FILE` has each rank measure its
own table, in which the last takes SLOW times as long, shares out batches by those, and
trains a few steps; rank 0 writes what came of it. `run` does that and trains the same
in one process. How long a rank waits is counted from the tables, by no clock.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.one_algorithm import one_algorithm
from mucudnn.ir.fleet import Fleet, Rank, StepPoint
from mucudnn.ir.graph import Graph
from mucudnn.models import IMAGE, LABEL, Model, get_model
from mucudnn.passes.load_balancing import equal_shares, measured_table, split_batch
from mucudnn.runtime.distributed.collectives import Collectives
from mucudnn.runtime.training.stepping import StepResult
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["BATCH", "CASES", "CLASSES", "Case", "mpiexec", "run", "trained", "tuner_of"]

BATCH, STEPS, CLASSES = 12, 3, 5
ROUGHLY = 0.5
"""Of a time, what the tables may be off: a few sizes do to tell ranks apart."""

_SECONDS = 900


def unet(g: Any, x: str, classes: int) -> tuple[str]:
    """Down, up, a shortcut; batch norm and dropout as the large ones have them."""

    def convs(x: str, channels: int) -> str:
        return str(g.relu(g.batch_norm(g.conv(x, channels, 3, padding=1))))

    first = convs(x, 4)
    low = g.dropout(convs(g.max_pool(first, 2), 8), 0.25)
    up = g.conv_transpose(low, 4, 2, stride=2)
    return (g.conv(convs(g.concat((first, up)), 4), classes, 1),)


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained.

    Attributes:
        model: The network.
        side: Of its images.
    """

    model: Any
    side: int

    def graph(self, samples: int, dtype: str = "float64") -> Graph:
        """Of a step of so many samples."""
        found: Graph = self.model(
            samples, image=self.side, classes=CLASSES, dtype=dtype
        )
        return found


CASES = {
    "resnet18": Case(get_model("resnet18"), 32),
    "unet": Case(Model(unet, (3, 8, 8), CLASSES), 48),
}


def tuner_of() -> Tuner:
    """One that measures little; sums are alike, of one algorithm and undivided."""
    return Tuner(
        backend=one_algorithm(),
        workspace_limit=1 << 20,
        cache=None,
        rule=StoppingRule(min_samples=1, max_samples=1),
        batch_policy="undivided",
    )


def trainer_of(graph: Graph, tuner: Tuner, **options: Any) -> Trainer:
    """With what all trainers here have."""
    return Trainer(
        graph, tuner=tuner, optimizer="momentum", learning_rate=0.05, **options
    )


def batches(graph: Graph) -> Iterator[tuple[Any, Any]]:
    """Whole batches of random images, for all ranks."""
    rng = np.random.default_rng(0)
    image, label = graph.tensors[IMAGE].shape[1:], graph.tensors[LABEL].shape[1:]
    for _ in range(STEPS):
        yield (
            rng.normal(size=(BATCH, *image)),
            rng.integers(0, CLASSES, (BATCH, *label)),
        )


def trained(
    case: Case,
    shares: Sequence[int] = (BATCH,),
    together: Collectives | None = None,
    *,
    parts: int = 1,
    dtype: str = "float64",
    look: Callable[[Trainer], object] = lambda trainer: None,
    **options: Any,
) -> tuple[list[StepResult], dict[str, Any]]:
    """What the steps found, and all weights and statistics at the end.

    Args:
        case: What is trained.
        shares: Of a batch, or of each of its parts if there are several.
        together: The ranks; None for one process.
        parts: Of a step.
        dtype: Of the network.
        look: Sees the trainer at the end.
        options: Of the trainer.
    """
    rank = 0 if together is None else together.rank
    graph = case.graph(shares[rank], dtype)
    first, size = sum(shares[:rank]), sum(shares)
    rows = [p * size + first + i for p in range(parts) for i in range(shares[rank])]
    options |= {"together": together, "gradient_accumulation": parts}
    with tuner_of() as tuner, trainer_of(graph, tuner, **options) as trainer:
        found = [
            trainer.step(images[rows], labels[rows])
            for images, labels in batches(graph)
        ]
        state = {n: np.array(v) for n, v in trainer.state.save().items()}
        look(trainer)
    return found, state


def _cpu_ms(trainer: Trainer, images: Any, labels: Any) -> float:
    """Of a step; what else a machine does is not in it."""
    began = time.process_time()
    trainer.step(images, labels)
    return 1e3 * (time.process_time() - began)


def planned(case: Case, slow: float, together: Collectives) -> Fleet:
    """The fleet as its ranks measure themselves in CPU time, the last slowed."""
    factor = slow if together.rank == together.size - 1 else 1.0

    def measure(samples: int) -> StepPoint:
        graph = case.graph(samples)
        images, labels = next(batches(graph))
        with (
            tuner_of() as tuner,
            trainer_of(graph, tuner, update_when="late") as trainer,
        ):
            took = [
                _cpu_ms(trainer, images[:samples], labels[:samples]) for _ in range(3)
            ]
        return StepPoint(samples, factor * min(took))

    most = BATCH - together.size + 1
    table = measured_table("cpu", 1, most, measure, tolerance=ROUGHLY)
    tables = together.all_gather(table)
    return Fleet(tuple(Rank(f"rank {i}", t) for i, t in enumerate(tables)))


def mpiexec() -> str | None:
    """Where it is; None where this Python cannot train over MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    return beside or shutil.which("mpiexec")


def run(name: str, slow: float, ranks: int = 2) -> dict[str, Any]:
    """Train over MPI and alone; shares, waiting, and how far the losses are apart.

    Raises:
        OSError: A rank failed; says what it said.
    """
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = (sys.executable, "-m", "bench.fleet_ranks", name, slow, file)
        done = subprocess.run(
            [str(mpiexec()), "-n", str(ranks), *map(str, words)],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={
                **os.environ,
                "FI_PROVIDER": "tcp",
                "MPICH_NETMASK": "127.0.0.1/8",
                "PYTHONPATH": str(root),
            },
        )
        if done.returncode:
            raise OSError(f"{name} over MPI: {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(file.read_text())
    of_all = found.pop("sums")
    steps, state = trained(CASES[name])
    apart = zip(found["losses"], (step.loss for step in steps), strict=True)
    sums = {key: float(np.abs(value).sum()) for key, value in state.items()}
    return {
        "model": name,
        "slow": slow,
        "over": "MPI",
        **found,
        "losses_alone": [step.loss for step in steps],
        "losses_apart": max(abs(a - b) / abs(b) for a, b in apart),
        "right_alike": found["correct"] == [step.correct for step in steps],
        "sums_apart": max(
            abs(of_one[key] - value) / max(value, 1e-6)
            for of_one in of_all
            for key, value in sums.items()
        ),
    }


def main(name: str, slow: str, file: str) -> None:
    """One of the ranks."""
    from mucudnn.runtime.distributed.collectives import MpiCollectives

    together = MpiCollectives()
    fleet = planned(CASES[name], float(slow), together)
    plan = split_batch(fleet, BATCH, at_least=1)
    steps, state = trained(
        CASES[name], plan.samples, together, batch_norm="synchronised"
    )
    of_all = together.all_gather({n: float(np.abs(v).sum()) for n, v in state.items()})
    if together.rank == 0:
        equal = equal_shares(fleet, BATCH)
        found = {
            "samples": plan.samples,
            "idle_planned_ms": plan.idle_ms[0],
            "idle_equal_ms": equal.idle_ms[0],
            "idle_fall": 1 - plan.idle_ms[0] / equal.idle_ms[0],
            "losses": [step.loss for step in steps],
            "correct": [step.correct for step in steps],
            "sums": of_all,
        }
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
