"""Random training graphs with forks, joins, views, sums in place, norms and dropout.

`foreign` makes of them what other frameworks bring: results that stay where they are,
nodes that never run again, memory of the caller, tied parameters, sizes in bytes.
"""

import itertools
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from hypothesis import strategies as st

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import AlgoPerf, ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.optimizers import Sgd
from mucudnn.ir.profile import Profile
from mucudnn.ir.tensor import Role
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS, Residency, saved_tensors

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
    "constant",
    "tied",
    "views",
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
        case "constant":
            return g.multiply(x, g.append("fill", (), g.shape(x), value=0.5))
        case "tied":
            first = g.nodes[0]
            return g.append("conv", (x, first.inputs[1]), g.shape(x), **first.attrs)
        case "views":
            flat = g.flatten(g.scale(x, 0.5))
            base = g.tensors[flat].alias
            return g.relu(g.append("reshape", (flat,), g.shape(x), alias=base))
        case _:
            return g.max_pool(x, 3, stride=1, padding=1)


@st.composite
def foreign(draw, graph, sizes=True):
    """A graph that says of its nodes what nobody else knows.

    Args:
        draw: Of hypothesis.
        graph: A training graph.
        sizes: Whether tensors get a data type of which only the size is known; such a
            graph is planned, not run.
    """
    tensors = dict(graph.tensors)
    nodes = [
        replace(
            node,
            traits=replace(
                node.traits,
                recomputable=draw(st.integers(0, 3)) > 0,
                movable=draw(st.integers(0, 3)) > 0,
            ),
        )
        for node in graph.nodes
    ]
    if draw(st.booleans()):
        tensors["image"] = replace(tensors["image"], role=Role.BORROWED)
    for spec in graph.with_role(Role.PARAMETER):
        twin = replace(spec, name=f"{spec.name}:twin", alias=spec.name)
        readers = [i for i, n in enumerate(nodes) if spec.name in n.inputs]
        at = draw(st.sampled_from(readers))
        if draw(st.booleans()) and spec.name not in nodes[at].mutates:
            tensors[twin.name] = twin
            inputs = (twin.name if t == spec.name else t for t in nodes[at].inputs)
            nodes[at] = replace(nodes[at], inputs=tuple(inputs))
    if sizes:
        for name, storage in graph.storages.items():
            spec, size = graph.tensors[name], draw(st.integers(1, 3))
            if name == storage and spec.dtype == "float32":
                nbytes = spec.nbytes * size + draw(st.integers(0, 1))
                odd = {"dtype": f"odd{size}", "storage_bytes": nbytes}
                for other, root in graph.storages.items():
                    if root == storage:
                        tensors[other] = replace(tensors[other], **odd)
    return Graph(tensors, tuple(nodes), graph.outputs, graph.gradients)


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
        if spec.alias is not None:
            found[name] = found[graph.storages[name]].reshape(spec.shape)
        elif spec.dtype == "int64":
            found[name] = rng.integers(0, 3, spec.shape)
        else:
            found[name] = rng.uniform(0.5, 1.5, spec.shape).astype(spec.dtype)
    return found
