"""What holds a device or a file says so when it is copied, and what works instead."""

import copy
import pickle

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Sgd
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner


def trainer():
    g = GraphBuilder()
    logits = g.linear(g.flatten(g.input("image", (4, 3, 1, 1))), 2)
    label = g.input("label", (4,), "int64")
    graph = g.build(g.softmax_cross_entropy(logits, label), g.accuracy(logits, label))
    return Trainer(graph, tuner=Tuner(cache=None), optimizer=Sgd(0.1))


HOLDERS = {
    "Tuner": (lambda: Tuner(backend="null"), "another with the same arguments"),
    "BenchmarkCache": (BenchmarkCache, r"BenchmarkCache\(path\)"),
    "Backend": (lambda: get_backend("cpu"), r"get_backend\('cpu', 0\)"),
    "Trainer": (trainer, r"other\.state\.load\(trainer\.state\.save\(\)\)"),
}


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_copy_is_refused_with_what_would_work(kind, act):
    make, words = HOLDERS[kind]
    one = make()
    if kind == "Backend" and act is copy.copy:
        assert copy.copy(one) == one  # its parts are chosen, not owned
        return
    with pytest.raises(TypeError, match=rf"an? {kind} can.*{words}"):
        act(one)


def test_what_a_trainer_proposes_works():
    one, other = trainer(), trainer()
    x, labels = np.ones((4, 3, 1, 1), np.float32), np.zeros(4, np.int64)
    one.step(x, labels)
    other.state.load(one.state.save())
    for name, value in one.state.save().items():
        np.testing.assert_array_equal(other.state.save()[name], value)
    one.close()
    other.close()
