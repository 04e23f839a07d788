"""Networks trained by several ranks together, which are threads here."""

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mucudnn.models import IMAGE, LABEL, Model, get_model
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner
from tests.one_algorithm import one_algorithm

BATCH, STEPS, CLASSES = 12, 3, 5
SECONDS = 300


@dataclass(frozen=True)
class Case:
    """A model, and the side of its images."""

    model: Any
    side: int

    def graph(self, samples, dtype="float64"):
        return self.model(samples, image=self.side, classes=CLASSES, dtype=dtype)


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


def plain(g, x, classes, width=6, dropped=0.25):
    """Convolutions, a dropout, the classes; no sample knows of another."""
    x = g.dropout(g.relu(g.conv(x, width, 3, padding=1)), dropped)
    x = g.max_pool(g.relu(g.conv(x, 8, 3, padding=1)), 2)
    return (g.linear(g.flatten(x), classes),)


def branches(g, x, classes):
    """Two normalised branches."""
    x = g.relu(g.conv(x, 4, 3, padding=1))
    one, other = (g.batch_norm(g.conv(x, 4, 3, padding=1)) for _ in range(2))
    return (g.linear(g.flatten(g.global_avg_pool(g.add(one, other))), classes),)


NETWORKS = {
    "resnet18": Case(get_model("resnet18"), 32),
    "unet-48": Case(Model(unet, (3, 8, 8), CLASSES), 48),
} | {
    name: Case(Model(body, (3, 8, 8), CLASSES), 8)
    for name, body in {
        "branches": branches,
        "plain": plain,
        "calmer": partial(plain, dropped=0.5),
        "wider": partial(plain, width=8),
        "residual": residual,
        "unet": unet,
    }.items()
}


def network(name, batch, dtype="float64"):
    return NETWORKS[name].graph(batch, dtype)


def tuner_of():
    """One that measures little; sums are alike, of one algorithm and undivided."""
    return Tuner(
        backend=one_algorithm(),
        workspace_limit=1 << 20,
        cache=None,
        rule=StoppingRule(min_samples=1, max_samples=1),
        batch_policy="undivided",
    )


def trainer_of(graph, tuner, **options):
    """With what all trainers here have."""
    return Trainer(
        graph, tuner=tuner, optimizer="momentum", learning_rate=0.05, **options
    )


def batches(graph):
    """Whole batches of random images, for all ranks."""
    rng = np.random.default_rng(0)
    image, label = graph.tensors[IMAGE].shape[1:], graph.tensors[LABEL].shape[1:]
    for _ in range(STEPS):
        images = rng.normal(size=(BATCH, *image))
        yield images, rng.integers(0, CLASSES, (BATCH, *label))


def train(
    name,
    shares=(BATCH,),
    together=None,
    *,
    parts=1,
    dtype="float64",
    look=lambda trainer: None,
    **options,
):
    """What the steps found, and all weights and statistics at the end.

    Args:
        name: What is trained.
        shares: Of a batch, or of each of its parts if there are several.
        together: The ranks; None for one process.
        parts: Of a step.
        dtype: Of the network.
        look: Sees the trainer at the end.
        options: Of the trainer.
    """
    rank = 0 if together is None else together.rank
    graph = network(name, shares[rank], dtype)
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


def trained(name, *shares_and_ranks, **options):
    """Losses and right answers of the steps, and the state at the end."""
    steps, state = train(name, *shares_and_ranks, **options)
    return [(step.loss, step.correct) for step in steps], state


class Threads:
    """Ranks that are threads of this process; none waits for another for ever."""

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
