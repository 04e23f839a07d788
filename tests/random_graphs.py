"""Random training graphs with forks, joins, views, sums in place, norms and dropout."""

import itertools
from types import MappingProxyType

import numpy as np
from hypothesis import strategies as st

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import AlgoPerf, ConvPlan
from mucudnn.ir.graph import PERSISTENT
from mucudnn.ir.optimizers import Sgd
from mucudnn.ir.profile import Profile
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.optimizer_updates import with_updates
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    Residency,
    saved_tensors,
)

CHANNELS, SIDE = 4, 4

LAYERS = (
    "conv",
    "batch_norm",
    "relu",
    "relu",
    "dropout",
    "gelu",
    "add",
    "concat",
    "reshape",
    "multiply",
    "lrn",
    "pool",
)


@st.composite
def training_graphs(draw, most=9, updates=False):
    """A training graph of small images."""
    g = GraphBuilder(seed=draw(st.integers(0, 3)))
    batch = draw(st.integers(2, 5))
    x = g.input("image", (batch, CHANNELS, SIDE, SIDE))
    label = g.input("label", (batch,), "int64")
    alive = [g.conv(x, CHANNELS, 3, padding=1)]
    for _ in range(draw(st.integers(0, most))):
        x = draw(st.sampled_from(alive[-3:]))
        y = _layer(g, draw(st.sampled_from(LAYERS)), x, draw(st.sampled_from(alive)))
        alive.append(y)
    y = alive[-1]
    if draw(st.booleans()) and len(alive) > 1:
        y = g.add(y, alive[-2])
    loss = g.softmax_cross_entropy(g.linear(g.flatten(y), 3), label)
    graph = training_graph(g.build(loss))
    return with_updates(graph, Sgd(0.1)) if updates else graph


def _layer(g: GraphBuilder, kind: str, x: str, other: str) -> str:
    match kind:
        case "conv":
            return g.conv(x, CHANNELS, 3, padding=1)
        case "batch_norm":
            return g.batch_norm(x)
        case "relu":
            return g.relu(x)
        case "dropout":
            return g.dropout(x, 0.3)
        case "gelu":
            return g.gelu(x)
        case "add":
            return g.add(x, other)
        case "multiply":
            return g.multiply(x, other)
        case "concat":
            return g.conv(g.concat([x, other]), CHANNELS, 1)
        case "reshape":
            shape = g.shape(x)
            return g.reshape(g.relu(g.flatten(x)), shape)
        case "lrn":
            return g.lrn(x)
        case _:
            return g.max_pool(x, 3, stride=1, padding=1)


@st.composite
def profiles(draw, graph):
    """Times, workspaces and links for a graph."""
    times = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    rate = st.sampled_from([256.0, 1024.0, 8192.0])
    node_ms, workspaces, fronts = {}, {}, {}
    for node in graph.nodes:
        node_ms[node.name] = draw(times)
        if node.op == "conv":
            front = fronts[node.name] = _front(draw, node.attrs["problem"])
            node_ms[node.name] = front[-1].time_ms
        elif draw(st.booleans()):
            workspaces[node.name] = draw(st.sampled_from([4, 600, 2000]))
    return Profile(
        node_ms=node_ms,
        workspaces=workspaces,
        fronts=fronts,
        out_bytes_per_ms=draw(rate),
        in_bytes_per_ms=draw(rate),
    )


def _front(draw, problem):
    count = draw(st.integers(1, 3))
    return tuple(
        ConvPlan(
            problem,
            (AlgoPerf(algo=f"a{i}", batch=problem.batch, time_ms=ms, workspace=size),),
        )
        for i, (ms, size) in enumerate(
            itertools.islice(((4.0, 0), (2.0, 700), (1.0, 3000)), count)
        )
    )


@st.composite
def residencies(draw, graph):
    """Any residency for any saved tensor, for state, and for everything else."""
    found = {
        saved.name: draw(st.sampled_from(Residency)) for saved in saved_tensors(graph)
    }
    if draw(st.booleans()):
        found[EVERYTHING] = draw(st.sampled_from([Residency.KEEP, Residency.PAGE]))
    moves = st.sampled_from([Residency.KEEP, Residency.OFFLOAD, Residency.PAGE])
    if draw(st.booleans()):
        found[PERSISTENTS] = draw(moves)
    for spec in graph.with_role(*PERSISTENT):
        if draw(st.booleans()):
            found[spec.name] = draw(moves)
    return MappingProxyType(found)


def feeds(graph, seed=0):
    """Values for everything that no node writes."""
    rng = np.random.default_rng(seed)
    found = {}
    for name in graph.inputs:
        spec = graph.tensors[name]
        if spec.dtype == "int64":
            found[name] = rng.integers(0, 3, spec.shape)
        else:
            found[name] = rng.uniform(0.5, 1.5, spec.shape).astype(spec.dtype)
    return found
