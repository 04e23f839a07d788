"""Train a network in less memory than its weights and their Adam state take."""

import numpy as np

from mucudnn import GraphBuilder, MemoryBudget, Trainer
from mucudnn.optim import Adam

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
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH, 1, 8, 8), dtype=np.float32)
    labels = rng.integers(0, CLASSES, BATCH)
    with Trainer(network, optimizer=Adam(learning_rate=1e-3), budget=budget) as trainer:
        return [trainer.step(images, labels).loss for _ in range(5)], trainer


expected, whole = train()
state = sum(value.nbytes for value in whole.state.values())
found, small = train(MemoryBudget(nbytes=state // 2))
assert found == expected, "budgets never change numbers"
assert small.peak_bytes <= state // 2
print(f"weights and their state: {state / 2**20:.1f} MiB")
print(f"a step without a budget: {whole.peak_bytes / 2**20:.1f} MiB")
print(f"the same, bit for bit, within {small.peak_bytes / 2**20:.1f} MiB")
home = small.placed.plan.schedule.hosted
print(f"{len(home)} of {len(whole.state)} tensors are stored on the host")
