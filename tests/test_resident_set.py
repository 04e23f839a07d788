"""The process's real memory keeps the promise: a budget, and the rest on disk."""

import sys

import pytest

from tests.commands import python

PROGRAM = """
import gc, sys, threading
from pathlib import Path
import numpy as np
from mucudnn import Tuner
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Momentum
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

g = GraphBuilder()
x = g.input("image", (32, 8, 128, 128))
labels = g.input("label", (32,), "int64")
for _ in range(16):
    x = g.gelu(g.bias(x))
logits = g.linear(g.flatten(g.global_avg_pool(x)), 10)
network = g.build(
    g.softmax_cross_entropy(logits, labels), g.accuracy(logits, labels)
)
budget = MemoryBudget(nbytes=80 << 20, policy="lru", disk=Path(sys.argv[1]))
trainer = Trainer(
    network, tuner=Tuner(), optimizer=Momentum(learning_rate=0.1), budget=budget
)
gc.collect()
most, stop = [0], threading.Event()

def watch():
    while not stop.wait(0.002):
        most[0] = max(most[0], resident())

watcher = threading.Thread(target=watch)
watcher.start()
images = np.ones((32, 8, 128, 128), "f4")
for _ in range(3):
    trainer.step(images, np.zeros(32, "i8"))
stop.set()
watcher.join()
trainer.close()
print(most[0], trainer.peak_bytes, trainer.placed.plan.prediction.out_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_resident_set_is_what_was_promised(tmp_path):
    out, _ = python("-c", PROGRAM, tmp_path)
    resident, promised, offloaded = map(int, out.split())
    assert promised <= 80 << 20
    assert offloaded > 150 << 20  # else there would be nothing to see
    assert resident <= 1.1 * promised + (150 << 20)
