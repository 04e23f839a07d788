"""Gradients are weighted, gathered in buckets, and summed while the pass still runs."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from mucudnn.ir.graph import Phase
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.runtime.distributed.collectives import TimedCollectives
from mucudnn.runtime.distributed.sum_gradients import summed_gradients


class Twice:
    """Another rank with the same gradients; says what was asked when."""

    rank, size = 0, 2

    def __init__(self):
        self.begun, self.waited = [], 0

    def all_reduce(self, array):
        self.begun.append(array.size)
        return Doubled(self, array)

    def all_gather(self, value):
        return [value, value]


class Doubled:
    def __init__(self, ranks, array):
        self.ranks, self.array = ranks, array

    def wait(self):
        self.ranks.waited += 1
        self.array *= 2


@pytest.mark.parametrize("bucket_bytes", [1, 4096, 1 << 30])
def test_sums_begin_behind_the_last_writer_and_end_before_the_update(bucket_bytes):
    graph = late()
    arrays = {
        g: np.full(graph.tensors[g].shape, 8.0, graph.tensors[g].dtype)
        for g in graph.gradients.values()
    }
    others = Twice()
    around = summed_gradients(
        graph,
        lambda node, tensor: arrays[tensor],
        others,
        0.25,
        bucket_bytes=bucket_bytes,
    )
    backward = [n.name for n in graph.nodes if n.phase is not Phase.UPDATE]
    first_update = None
    for node in graph.nodes:
        for call in around.before.get(node.name, ()):
            call()
        if node.phase is Phase.UPDATE:
            first_update = first_update or node
            (gradient,) = arrays.keys() & set(node.inputs)
            assert (arrays[gradient] == 2 * 0.25 * 8.0).all()
        for call in around.after.get(node.name, ()):
            assert node.phase is not Phase.UPDATE
            call()
        if node.name == backward[-2] and bucket_bytes < 1 << 30:
            assert others.begun  # while there is something left to compute
    assert sum(others.begun) == graph.parameter_count
    expected = {1: len(arrays), 1 << 30: 1}
    assert len(others.begun) == expected.get(bucket_bytes, len(others.begun))
    assert others.waited == len(others.begun)


class Other(Twice):
    """A rank whose other one says something else."""

    def __init__(self, *said):
        super().__init__()
        self.said = [*said]

    def all_gather(self, value):
        return [value, self.said.pop(0)(value)]


def summed(graph, others, **options):
    arrays = {
        g: np.full(graph.tensors[g].shape, 8.0, graph.tensors[g].dtype)
        for g in graph.gradients.values()
    }
    around = summed_gradients(
        graph, lambda node, tensor: arrays[tensor], others, 0.25, **options
    )
    return arrays, around


def late():
    return with_updates(training_graph(get_model("lenet")(2)), Momentum(), when="late")


def test_buckets_wait_for_as_many_meetings_as_on_the_furthest_rank():
    graph = late()
    last = len(graph.nodes) - 1 - len(graph.gradients)
    others = Other(lambda own: own, lambda met: [1 for _ in met])
    _, around = summed(graph, others, meetings=[last], bucket_bytes=1)
    for node in graph.nodes[:last]:
        for call in around.after.get(node.name, ()):
            call()
    assert not others.begun
    for call in around.after[graph.nodes[last].name]:
        call()
    assert len(others.begun) == len(graph.gradients)


def test_other_networks_and_early_updates_are_refused():
    with pytest.raises(ValueError, match="train different networks"):
        summed(late(), Other(lambda own: own[1:]))
    early = with_updates(training_graph(get_model("lenet")(2)), Momentum())
    with pytest.raises(ValueError, match="use order='builder'"):
        summed(early, Twice())


def test_narrow_gradients_are_summed_in_single_precision():
    graph = late()
    narrow = {
        g: replace(graph.tensors[g], dtype="float16") for g in graph.gradients.values()
    }
    tensors = MappingProxyType({**graph.tensors, **narrow})
    graph, others = replace(graph, tensors=tensors), Twice()
    arrays, around = summed(graph, others)
    for array in arrays.values():
        array[...] = 6e4  # twice that is more than float16 holds, half of it is not
        array.flat[0] = np.inf
    for node in graph.nodes:
        for call in (
            *around.before.get(node.name, ()),
            *around.after.get(node.name, ()),
        ):
            call()
    for array in arrays.values():
        assert np.isinf(array.flat[0])
        np.testing.assert_array_equal(array.flat[1:], np.float16(3e4))


def test_what_is_spent_in_collectives_is_counted():
    clock = iter(range(100))
    upstream = Twice()
    timed = TimedCollectives(upstream, now=lambda: next(clock) * 1e-3)
    values = np.ones(2)
    pending = timed.all_reduce(values)
    assert timed.waited_ms() == pytest.approx(1)
    pending.wait()
    pending.wait()
    assert timed.waited_ms() == pytest.approx(2)
    assert timed.waited_ms() == 0
    assert (timed.rank, timed.size, upstream.waited) == (0, 2, 2)
    np.testing.assert_array_equal(values, 4)
