"""Networks trained by several ranks together: threads here, processes under mpiexec.

`mpiexec -n 2 python together.py NETWORK SLOW FILE` trains with shares that the planner
finds where the last rank takes SLOW times as long; rank 0 writes what came of it.
"""

import json
import sys
import threading
from pathlib import Path

import numpy as np

from mucudnn.ir.fleet import Fleet, Rank, StepPoint
from mucudnn.models import IMAGE, LABEL, Model, get_model
from mucudnn.passes.fleet import equal_shares, split_batch
from mucudnn.passes.fleet.sizes import measured_table
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK

BATCH, STEPS, SIDE, CLASSES = 12, 3, 8, 5
SECONDS = 40


def unet(g, x, classes):
    """Down, up, a shortcut; batch norm and dropout as the large ones have them."""

    def convs(x, channels):
        return g.relu(g.batch_norm(g.conv(x, channels, 3, padding=1)))

    first = convs(x, 4)
    low = g.dropout(convs(g.max_pool(first, 2), 8), 0.25)
    up = g.conv_transpose(low, 4, 2, stride=2)
    return (g.conv(convs(g.concat((first, up)), 4), classes, 1),)


def residual(g, x, classes):
    """A convolution, a block with a shortcut as a ResNet's, the classes."""
    x = g.relu(g.batch_norm(g.conv(x, 6, 3, padding=1)))
    y = g.relu(g.batch_norm(g.conv(x, 6, 3, padding=1)))
    y = g.batch_norm(g.conv(y, 6, 3, padding=1))
    x = g.relu(g.add(y, x))
    return (g.linear(g.flatten(g.global_avg_pool(x)), classes),)


def plain(g, x, classes):
    """Convolutions, a dropout, the classes; no sample knows of another."""
    x = g.dropout(g.relu(g.conv(x, 6, 3, padding=1)), 0.25)
    x = g.max_pool(g.relu(g.conv(x, 8, 3, padding=1)), 2)
    return (g.linear(g.flatten(x), classes),)


def branches(g, x, classes):
    """Two normalised branches."""
    x = g.relu(g.conv(x, 4, 3, padding=1))
    one, other = (g.batch_norm(g.conv(x, 4, 3, padding=1)) for _ in range(2))
    return (g.linear(g.flatten(g.global_avg_pool(g.add(one, other))), classes),)


NETWORKS = {
    "branches": Model(branches, (3, SIDE, SIDE), CLASSES),
    "plain": Model(plain, (3, SIDE, SIDE), CLASSES),
    "residual": Model(residual, (3, SIDE, SIDE), CLASSES),
    "resnet20": get_model("resnet20"),
    "unet": Model(unet, (3, SIDE, SIDE), CLASSES),
}


def network(name, batch, dtype="float64"):
    return NETWORKS[name](batch, image=SIDE, classes=CLASSES, dtype=dtype)


def batches(graph):
    """Whole batches of random images, for all ranks."""
    rng = np.random.default_rng(0)
    image, label = graph.tensors[IMAGE].shape[1:], graph.tensors[LABEL].shape[1:]
    for _ in range(STEPS):
        yield (
            rng.normal(size=(BATCH, *image)),
            rng.integers(0, CLASSES, (BATCH, *label)),
        )


def tuner_of():
    return Tuner(
        workspace_limit=1 << 20, cache=None, rule=QUICK, batch_policy="undivided"
    )


def trainer_of(graph, tuner, **options):
    return Trainer(
        graph,
        tuner=tuner,
        optimizer="momentum",
        learning_rate=0.05,
        **options,
    )


def trained(
    name,
    shares=(BATCH,),
    together=None,
    *,
    parts=1,
    dtype="float64",
    look=lambda trainer: None,
    **options,
):
    """Losses of the steps, and all weights and statistics at the end.

    Shares are of a batch, or of each of its parts if there are several; `look` sees
    the trainer at the end.
    """
    rank = 0 if together is None else together.rank
    graph = network(name, shares[rank], dtype)
    first, size = sum(shares[:rank]), sum(shares)
    rows = [p * size + first + i for p in range(parts) for i in range(shares[rank])]
    with (
        tuner_of() as tuner,
        trainer_of(
            graph, tuner, together=together, gradient_accumulation=parts, **options
        ) as trainer,
    ):
        found = [
            trainer.step(images[rows], labels[rows])
            for images, labels in batches(graph)
        ]
        state = {n: np.array(v) for n, v in trainer.state.save().items()}
        look(trainer)
    return [(step.loss, step.correct) for step in found], state


class Threads:
    """Ranks that are threads of this process; what they do ends within a minute."""

    def __init__(self, size):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._values = [None] * size

    def run(self, work):
        """What each rank's work returns; the first error ends all."""
        found, errors = [None] * self.size, []

        def ranked(rank):
            try:
                found[rank] = work(ThreadRank(self, rank))
            except threading.BrokenBarrierError:
                pass
            except Exception as e:  # handed on
                errors.append(e)
                self._barrier.abort()

        threads = [threading.Thread(target=ranked, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def gathered(self, rank, value):
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class ThreadRank:
    """One of them."""

    def __init__(self, threads, rank):
        self._threads, self.rank, self.size = threads, rank, threads.size

    def all_gather(self, value):
        return self._threads.gathered(self.rank, value)

    def all_reduce(self, array):
        arrays = self.all_gather(array.copy())
        array[...] = sum(arrays[1:], arrays[0])
        return self

    def wait(self):
        pass


def planned(name, slow, together):
    """The fleet as its ranks measure themselves, the last slowed."""
    factor = slow if together.rank == together.size - 1 else 1.0

    def measure(samples):
        graph = network(name, samples)
        images, labels = next(batches(graph))
        with (
            tuner_of() as tuner,
            trainer_of(graph, tuner, update_when="late") as trainer,
        ):
            took = [
                trainer.profile(images[:samples], labels[:samples])[1] for _ in range(3)
            ]
        return StepPoint(samples, factor * min(took))

    table = measured_table("cpu", 1, BATCH - together.size + 1, measure)
    tables = together.all_gather(table)
    return Fleet(tuple(Rank(f"rank {i}", t) for i, t in enumerate(tables)))


def main(name, slow, file):
    from mucudnn.runtime.distributed.mpi import MpiCollectives

    together = MpiCollectives()
    fleet = planned(name, float(slow), together)
    plan = split_batch(fleet, BATCH, at_least=1)
    steps, state = trained(name, plan.samples, together, batch_norm="synchronised")
    sums = {n: float(np.abs(v).sum()) for n, v in state.items()}
    of_all = together.all_gather(sums)
    if together.rank == 0:
        equal = equal_shares(fleet, BATCH)
        found = {
            "samples": plan.samples,
            "idle_ms": max(plan.idle_ms),
            "idle_equal_ms": max(equal.idle_ms),
            "losses": [loss for loss, _ in steps],
            "correct": [correct for _, correct in steps],
            "sums": of_all,
        }
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
