"""Train a network in less memory than its weights and their Adam state take."""

import numpy as np

from mucudnn import Tuner
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Adam
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.planning.evaluate import state_bytes
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer

BATCH, CLASSES, WIDTH = 16, 10, 512

g = GraphBuilder()
x = g.flatten(g.input("image", (BATCH, 1, 8, 8)))
for _ in range(5):
    x = g.relu(g.linear(x, WIDTH))
label = g.input("label", (BATCH,), "int64")
logits = g.linear(x, CLASSES)
network = g.build(g.softmax_cross_entropy(logits, label), g.accuracy(logits, label))


def train(budget: MemoryBudget | None = None) -> tuple[list[float], Trainer]:
    """Losses of a few steps on one batch, and the trainer."""
    adam = Adam(learning_rate=1e-3)
    trainer = Trainer(network, tuner=Tuner(), optimizer=adam, budget=budget)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH, 1, 8, 8), dtype=np.float32)
    labels = rng.integers(0, CLASSES, BATCH)
    losses = [trainer.step(images, labels).loss for _ in range(5)]
    trainer.close()
    return losses, trainer


expected, whole = train()
state = state_bytes(whole.graph)
found, small = train(MemoryBudget(nbytes=state // 2))
assert found == expected, "budgets never change numbers"
assert small.peak_bytes <= state // 2
print(f"weights and their state: {format_bytes(state)}")
print(f"a step without a budget: {format_bytes(whole.peak_bytes)}")
print(f"the same, bit for bit, within {format_bytes(small.peak_bytes)}")
home = small.placed.plan.schedule.hosted
print(f"{len(home)} of {len(whole.state)} tensors are at home on the host")
