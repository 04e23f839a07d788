"""A small network to train, with data it can learn."""

import numpy as np

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Momentum
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK
from tests.one_algorithm import one_algorithm

CLASSES, SHAPE = 3, (2, 6, 6)


def network(batch, *, training=True, norm=True, dropout=0.0, dtype="float32"):
    """A convolution, normalisation, dropout and a dense layer."""
    g = GraphBuilder(dtype=dtype, training=training, seed=5)
    x = g.conv(g.input("image", (batch, *SHAPE)), 4, 3, padding=1)
    x = g.relu(g.batch_norm(x) if norm else x)
    x = g.dropout(g.flatten(g.max_pool(x, 2)), dropout)
    logits = g.linear(x, CLASSES)
    label = g.input("label", (batch,), "int64")
    return g.build(g.softmax_cross_entropy(logits, label), g.accuracy(logits, label))


def examples(count, seed=0):
    """Images whose mean brightness of a corner says their class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    images = rng.standard_normal((count, *SHAPE)).astype(np.float32)
    for i, label in enumerate(labels):
        images[i, :, 2 * label : 2 * label + 2] += 1.5
    return images, labels


class Epochs:
    """Batches in an order that depends on the epoch."""

    def __init__(self, count, batch, *, partial=False):
        self.images, self.labels = examples(count)
        self.batch = batch
        self.length = -(-count // batch) if partial else count // batch

    def __len__(self):
        return self.length

    def epoch(self, epoch, start=0):
        order = np.random.default_rng(epoch).permutation(len(self.images))
        for i in range(start, self.length):
            rows = order[i * self.batch : (i + 1) * self.batch]
            yield self.images[rows], self.labels[rows]


def tuner_of(backend="cpu", **options):
    """One that measures little, and leaves a clock no algorithm to choose on the CPU.

    So every convolution sums in one order and takes the same workspace, whenever it is
    planned; and each is undivided, unless `options` say otherwise.
    """
    options = {"rule": QUICK, "batch_policy": "undivided", "cache": None} | options
    chosen = one_algorithm() if backend == "cpu" else backend
    return Tuner(backend=chosen, **options)


def trainer(batch=8, *, backend="cpu", parts=1, options=None, evaluate=True, **more):
    options = options or {}
    graphs = [network(batch // parts, **options)]
    if evaluate:
        graphs.append(network(batch // parts, training=False, **options))
    more.setdefault("optimizer", Momentum(learning_rate=0.05))
    tuner = tuner_of(backend)
    return Trainer(*graphs, tuner=tuner, gradient_accumulation=parts, **more)


def weights(made):
    return made.state.save()
