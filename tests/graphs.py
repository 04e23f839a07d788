"""Random graphs, and their meaning: what every node reads, whatever the order.

A symbolic run gives every value a number; two runs that compute the same things from
the same things get the same numbers. It knows nothing of dependencies or liveness.
"""

from dataclasses import replace

from hypothesis import strategies as st

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import PLAIN, NodeTraits
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.split import split_along
from mucudnn.passes.graph.split_axis import along_batch
from mucudnn.passes.scheduling.problem import origin

UNARY = ("relu", "bias", "scale", "mix")
BINARY = ("add", "multiply", "relu_grad", "mix")

TRAITS = {
    "reshape": NodeTraits(view=True),
    "relu_grad": NodeTraits(overwrites=(1,)),
    **dict.fromkeys(("relu", "bias", "scale"), NodeTraits(overwrites=(0,))),
    **dict.fromkeys(("add", "multiply"), NodeTraits(overwrites=(0, 1))),
}
"""These nodes are of nobody's: they say themselves what they are."""


class Symbols:
    """Numbers for values, the same for the same value."""

    def __init__(self):
        self._numbers = {}

    def number(self, *value):
        return self._numbers.setdefault(value, len(self._numbers))

    def start(self, graph):
        return {
            name: self.number("start", name)
            for name in graph.inputs
            if graph.tensors[name].alias is None
        }

    def run(self, graph, node, memory):
        """Change memory as a node, or a copy of it, does; return what it reads."""
        storages = graph.storages
        read = tuple(memory[storages[name]] for name in node.inputs)
        who = origin(node.name)
        for i, name in enumerate(node.mutates):
            memory[storages[name]] = self.number("mutated", who, i, read)
        for i, name in enumerate(node.outputs):
            if not node.traits.view:
                memory[storages[name]] = self.number("written", who, i, read)
        return read

    def meaning(self, graph):
        """What every node reads; outputs and persistent tensors at the end."""
        memory = self.start(graph)
        reads = {node.name: self.run(graph, node, memory) for node in graph.nodes}
        return reads, self.left(graph, memory)

    def left(self, graph, memory):
        wanted = (*graph.outputs, *graph.gradients.values())
        roots = {
            spec.name for spec in graph.with_role(*PERSISTENT) if spec.alias is None
        }
        return (
            [memory[graph.storages[name]] for name in wanted],
            {name: memory[name] for name in sorted(roots)},
        )


class _Draft:
    def __init__(self, draw):
        self.draw = draw
        self.tensors = {}
        self.nodes = []
        self.pool = []
        self.roots = {}

    def declare(self, shape, role=Role.ACTIVATION, alias=None):
        name = f"t{len(self.tensors)}"
        self.tensors[name] = TensorSpec(name, shape, "float32", role, alias)
        self.roots[name] = self.roots[alias] if alias else name
        self.pool.append(name)
        return name

    def shape(self):
        return (self.draw(st.sampled_from([1, 2, 2, 3, 5, 8])),)

    def pick(self, names=None):
        return self.draw(st.sampled_from(names or self.pool))

    def forget(self, root):
        self.pool = [name for name in self.pool if self.roots[name] != root]

    def own(self):
        """Tensors that may be overwritten: of the step, not from outside."""
        written = {name for node in self.nodes for name in node.outputs}
        return [name for name in self.pool if self.roots[name] in written]

    def add(self, op, inputs, outputs=(), mutates=()):
        name = f"n{len(self.nodes)}"
        self.nodes.append(
            Node(
                name,
                op,
                tuple(inputs),
                tuple(outputs),
                mutates=tuple(mutates),
                traits=TRAITS.get(op, PLAIN),
            )
        )

    def node(self):
        kind = self.pick(["new"] * 5 + ["view", "sum", "state", "fill", "part"])
        own = self.own()
        states = [n for n in self.pool if self.tensors[n].role is Role.STATE]
        if kind == "view":
            x = self.pick()
            self.add("reshape", [x], [self.declare(self.tensors[x].shape, alias=x)])
        elif kind == "sum" and own:
            x, y = self.pick(own), self.pick()
            self.forget(self.roots[x])
            self.add("add", [x, y], [self.declare(self.tensors[x].shape, alias=x)])
        elif kind == "state" and states:
            state = self.pick(states)
            x = self.pick()
            self.add("momentum", dict.fromkeys([state, x]), mutates=[state])
            self.forget(state)
            self.pool.append(state)
        elif kind == "fill" and states:
            state = self.pick(states)
            self.forget(state)
            shape = self.tensors[state].shape
            self.add("fill", [], [self.declare(shape, alias=state)])
        else:
            x, y = self.pick(), self.pick()
            if self.draw(st.booleans()):
                inputs, op = [x, y], self.pick(BINARY)
            else:
                inputs, op = [x], self.pick(UNARY)
            keep_shape = op != "mix" or self.draw(st.booleans())
            shape = self.tensors[x].shape if keep_shape else self.shape()
            outputs = [self.declare(shape)]
            if kind == "part":
                outputs.append(self.declare(self.shape()))
            self.add(op, inputs, outputs)


@st.composite
def graphs(draw, *, least=1, most=12, phases=False):
    """A graph with views, sums in place, and state that nodes change."""
    draft = _Draft(draw)
    for role in (Role.INPUT, Role.PARAMETER, Role.STATE):
        draft.declare(draft.shape(), role)
    for _ in range(draw(st.integers(least, most))):
        draft.node()
    nodes = draft.nodes
    if phases:
        turn = draw(st.integers(0, len(nodes)))
        nodes = nodes[:turn] + [replace(n, phase=Phase.BACKWARD) for n in nodes[turn:]]
    outputs = draw(st.lists(st.sampled_from(draft.pool), max_size=3, unique=True))
    return Graph(draft.tensors, tuple(nodes), tuple(outputs))


@st.composite
def scratch(draw, graph):
    """Workspaces for some nodes of a graph."""
    sizes = st.sampled_from([0, 0, 4, 16, 40])
    return {node.name: nbytes for node in graph.nodes if (nbytes := draw(sizes))}


def split_batch(graph, parts, batch=None):
    return split_along(graph, parts, along_batch(graph, batch))


def chain(depth, *, batch=2, channels=3, size=4):
    """A training graph of convolutions with bias and activation function."""
    b = GraphBuilder()
    x = b.input("image", (batch, channels, size, size))
    for _ in range(depth):
        x = b.relu(b.conv(x, channels, 3, padding=1))
    return training_graph(b.build(b.mean_squared_error(x, x)))


def inception(blocks=2, *, batch=2, channels=8, size=8):
    """Parallel branches of unequal width, concatenated."""
    b = GraphBuilder()
    x = b.input("image", (batch, channels, size, size))
    for _ in range(blocks):
        wide = b.conv(b.relu(b.conv(x, 4 * channels, 1)), 2, 3, padding=1)
        narrow = b.conv(b.conv(x, 1, 1), 3, 3, padding=1)
        pooled = b.conv(b.max_pool(x, 3, 1, 1), 2, 1)
        x = b.concat([b.conv(x, 1, 1), wide, narrow, pooled])
    return _with_loss(b, x)


def densenet(layers=4, *, batch=2, growth=3, size=8):
    """Every layer reads all before it."""
    b = GraphBuilder()
    x = b.input("image", (batch, growth, size, size))
    for _ in range(layers):
        y = b.conv(b.relu(b.batch_norm(x)), growth, 3, padding=1)
        x = b.concat([x, y])
    return _with_loss(b, x)


def unet(depth=3, *, batch=2, channels=2, size=16):
    """Long shortcuts from the way down to the way up."""
    b = GraphBuilder()
    x = b.input("image", (batch, channels, size, size))
    skips = []
    for _ in range(depth):
        x = b.relu(b.conv(x, 2 * b.shape(x)[1], 3, padding=1))
        skips.append(x)
        x = b.max_pool(x, 2)
    for skip in reversed(skips):
        x = b.concat([skip, b.upsample_nearest(x)])
        x = b.relu(b.conv(x, b.shape(skip)[1], 3, padding=1))
    return _with_loss(b, x)


def residual(blocks=3, *, batch=2, channels=4, size=8):
    """Shortcuts around two convolutions."""
    b = GraphBuilder()
    x = b.input("image", (batch, channels, size, size))
    for _ in range(blocks):
        y = b.relu(b.batch_norm(b.conv(x, channels, 3, padding=1, bias=False)))
        y = b.batch_norm(b.conv(y, channels, 3, padding=1, bias=False))
        x = b.relu(b.add(y, x))
    return _with_loss(b, x)


def _with_loss(b, x):
    labels = b.input("labels", (b.shape(x)[0],), "int64")
    logits = b.linear(b.flatten(b.global_avg_pool(x)), 5)
    return training_graph(b.build(b.softmax_cross_entropy(logits, labels)))


NETWORKS = {
    "chain": lambda: chain(4),
    "inception": inception,
    "densenet": densenet,
    "unet": unet,
    "residual": residual,
}
