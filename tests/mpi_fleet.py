"""Ranks over MPI that really train in step, the last of them slowed.

`mpiexec -n 2 python -m tests.mpi_fleet NETWORK SLOW FILE` has each rank measure its own
table, in which the last takes SLOW times as long, shares out batches by those, and
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
from pathlib import Path

import numpy as np

from mucudnn.ir.fleet import Fleet, Rank, StepPoint
from mucudnn.passes.load_balancing import equal_shares, measured_table, split_batch
from tests.together import BATCH, batches, network, train, trainer_of, tuner_of

ROUGHLY = 0.5
"""Of a time, what the tables may be off: a few sizes do to tell ranks apart."""

SECONDS = 900


def cpu_ms(trainer, images, labels):
    """Of a step; what else a machine does is not in it."""
    began = time.process_time()
    trainer.step(images, labels)
    return 1e3 * (time.process_time() - began)


def planned(name, slow, together):
    """The fleet as its ranks measure themselves in CPU time, the last slowed."""
    factor = slow if together.rank == together.size - 1 else 1.0

    def measure(samples):
        graph = network(name, samples)
        images, labels = next(batches(graph))
        with (
            tuner_of() as tuner,
            trainer_of(graph, tuner, update_when="late") as trainer,
        ):
            took = [
                cpu_ms(trainer, images[:samples], labels[:samples]) for _ in range(3)
            ]
        return StepPoint(samples, factor * min(took))

    most = BATCH - together.size + 1
    table = measured_table("cpu", 1, most, measure, tolerance=ROUGHLY)
    tables = together.all_gather(table)
    return Fleet(tuple(Rank(f"rank {i}", t) for i, t in enumerate(tables)))


def mpiexec():
    """Where it is; None where this Python cannot train over MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    return beside or shutil.which("mpiexec")


def run(name, slow, ranks=2):
    """Train over MPI and alone; shares, waiting, and how far the losses are apart."""
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = (sys.executable, "-m", "tests.mpi_fleet", name, slow, file)
        done = subprocess.run(
            [str(mpiexec()), "-n", str(ranks), *map(str, words)],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={
                **os.environ,
                "FI_PROVIDER": "tcp",
                "MPICH_NETMASK": "127.0.0.1/8",
                "PYTHONPATH": str(root),
            },
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(file.read_text())
    of_all = found.pop("sums")
    steps, state = train(name)
    apart = zip(found["losses"], (step.loss for step in steps), strict=True)
    sums = {key: float(np.abs(value).sum()) for key, value in state.items()}
    return {
        **found,
        "losses_apart": max(abs(a - b) / abs(b) for a, b in apart),
        "right_alike": found["correct"] == [step.correct for step in steps],
        "sums_apart": max(
            abs(of_one[key] - value) / max(value, 1e-6)
            for of_one in of_all
            for key, value in sums.items()
        ),
    }


def main(name, slow, file):
    """One of the ranks."""
    from mucudnn.runtime.distributed.collectives import MpiCollectives

    together = MpiCollectives()
    fleet = planned(name, float(slow), together)
    plan = split_batch(fleet, BATCH, at_least=1)
    steps, state = train(name, plan.samples, together, batch_norm="synchronised")
    of_all = together.all_gather({n: float(np.abs(v).sum()) for n, v in state.items()})
    if together.rank == 0:
        idle, equal = plan.idle_ms[0], equal_shares(fleet, BATCH).idle_ms[0]
        found = {
            "samples": plan.samples,
            "idle_fall": 1 - idle / equal,
            "losses": [step.loss for step in steps],
            "correct": [step.correct for step in steps],
            "sums": of_all,
        }
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
