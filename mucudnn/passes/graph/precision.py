"""Mixed precision: casts, narrow parameter copies and loss scaling."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from mucudnn.arguments import check_choice
from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.initializers import Constant, CopyOf
from mucudnn.ir.operations import make_node
from mucudnn.ir.optimizers import DynamicLossScale
from mucudnn.ir.tensor import INTEGERS, Role, TensorSpec
from mucudnn.passes.graph.autodiff import LOSS_SCALE

COUNTS = "loss_scale:counts"
"""Name of a tensor of three int64: whether a gradient overflowed, steps since the last
overflow or growth of the scale, and the number of skipped steps."""


def with_scale_as_state(graph: Graph, scaling: DynamicLossScale) -> Graph:
    """Return a training graph whose loss scale is state instead of an input."""
    scale = replace(graph.tensors[LOSS_SCALE], role=Role.STATE)
    scaling.range_in(scale.dtype)
    counts = TensorSpec(COUNTS, (3,), "int64", Role.STATE)
    return replace(
        graph,
        tensors={**graph.tensors, LOSS_SCALE: scale, COUNTS: counts},
        initializers={
            **graph.initializers,
            LOSS_SCALE: Constant(scaling.initial),
            COUNTS: Constant(0.0),
        },
    )


def overflow_checks(graph: Graph, gradients: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes that check gradients for overflow."""
    return tuple(
        make_node(
            graph.tensors,
            name=f"{gradient}:overflow",
            op="find_overflow",
            inputs=(gradient, COUNTS),
            outputs=(),
            phase=Phase.UPDATE,
            mutates=(COUNTS,),
        )
        for gradient in dict.fromkeys(gradients)
    )


def scale_adjustment(graph: Graph, scaling: DynamicLossScale) -> Node:
    """Return the node that adjusts the scale for the next step."""
    least, most = scaling.range_in(graph.tensors[LOSS_SCALE].dtype)
    attrs = {
        "growth": scaling.growth,
        "backoff": scaling.backoff,
        "interval": scaling.interval,
        "least": least,
        "most": most,
    }
    return make_node(
        graph.tensors,
        name="loss_scale:adjust",
        op="adjust_loss_scale",
        inputs=(LOSS_SCALE, COUNTS),
        outputs=(),
        attrs=attrs,
        phase=Phase.UPDATE,
        mutates=(LOSS_SCALE, COUNTS),
    )


# Convert a forward graph to mixed precision: activations in a low-precision dtype.
#
# Convolutions and matrix products compute in the low-precision dtype. Operations behind
# them read and write it if their traits allow; they still compute in single precision,
# but move half the bytes. Parameters, running and saved statistics, losses and updates
# keep the network's dtype, also where a loss reads low-precision logits; a parameter is
# cast before a product reads it (Micikevicius et al. 2018). The backward pass is
# derived from the forward pass, so gradients have the dtypes of their tensors.


LOSS_SCALES: Mapping[str, float] = MappingProxyType(
    {"float16": 1024.0, "bfloat16": 1.0}
)
"""Static loss scale of each low-precision dtype, which avoids gradient underflow."""


def to_mixed_precision(graph: Graph, dtype: str) -> Graph:
    """Return a forward graph with activations in `float16` or `bfloat16`."""
    check_choice("narrow type", dtype, LOSS_SCALES)
    tensors, nodes = dict(graph.tensors), list[Node]()
    narrow_of: dict[str, str] = {}  # tensor -> its low-precision form
    wide_of: dict[str, str] = {}  # tensor computed in low precision -> its wide form
    native: set[str] = set()  # tensors computed in low precision

    def cast(source: str, spec: TensorSpec) -> str:
        tensors[spec.name] = spec
        name = f"{spec.name}:cast"
        nodes.append(make_node(tensors, name, "cast", (source,), (spec.name,)))
        return spec.name

    def narrowed(name: str) -> str:
        if name not in narrow_of:
            spec = TensorSpec(f"{name}:{dtype}", graph.tensors[name].shape, dtype)
            narrow_of[name] = cast(name, spec)
        return narrow_of[name]

    def widened(name: str) -> str:
        if name not in native:
            return name
        if name not in wide_of:
            spec = graph.tensors[name]
            wide = TensorSpec(f"{name}:{spec.dtype}", spec.shape, spec.dtype)
            wide_of[name] = cast(narrow_of[name], wide)
        return wide_of[name]

    for node in graph.nodes:
        # Inputs that get low precision where their node does; weights of products only.
        specs = [graph.tensors[name] for name in node.inputs]
        data = [
            spec.name
            for spec in specs
            if spec.dtype not in INTEGERS
            if node.traits.expensive or spec.role not in PERSISTENT
        ]
        if not node.traits.expensive and (
            not node.traits.narrow or native.isdisjoint(data)
        ):
            unconverted = node.inputs[:1] if node.traits.reads_narrow else ()
            inputs = tuple(
                narrow_of[name]
                if name in unconverted and name in native
                else widened(name)
                for name in node.inputs
            )
            nodes.append(replace(node, inputs=inputs))
            continue
        inputs = tuple(narrowed(t) if t in data else t for t in node.inputs)
        # The first result has low precision; outputs of the graph keep their names.
        first, *others = node.outputs
        spec, returned = graph.tensors[first], first in graph.outputs
        result = f"{first}:{dtype}" if returned else first
        # A view shares the storage of the cast input instead of the original one.
        read = dict(zip(node.inputs, inputs, strict=True))
        alias = None if spec.alias is None else read.get(spec.alias, spec.alias)
        tensors[result] = replace(spec, name=result, dtype=dtype, alias=alias)
        narrow_of[first] = result
        native.add(first)
        attrs = dict(node.attrs)
        if node.op == "conv":
            attrs["problem"] = replace(attrs["problem"], dtype=dtype)
        outputs, attributes = (result, *others), MappingProxyType(attrs)
        nodes.append(replace(node, inputs=inputs, outputs=outputs, attrs=attributes))
        if returned:
            wide_of[first] = cast(result, spec)
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


# Cache cast or transposed copies of parameters between steps.
#
# In mixed precision products read parameters in low precision, and channels-last
# convolutions read transposed filters. Making these copies in every step costs extra
# launches, reads and writes; an update can write the copy along with the parameter. The
# copy is then state, which occupies memory at all times.


def with_copies_of_parameters(graph: Graph) -> Graph:
    """Return a training graph whose copies of parameters are state."""
    tensors: dict[str, TensorSpec] = dict(graph.tensors)
    copies: dict[str, CopyOf] = {}
    made_of: dict[str, str] = {}  # cast or transposed tensor -> its parameter
    for node in graph.nodes:
        if node.op not in ("cast", "to_channels_last"):
            continue
        (source,), (copy,) = node.inputs, node.outputs
        w = made_of.get(source, source)
        if w not in graph.gradients:
            continue
        made_of[copy] = w
        own, made, computed = (
            (tensors[name].dtype, tensors[name].layout)
            for name in (w, copy, graph.gradients[w])
        )
        # Only copies in the form of the gradient, which is that of the products'
        # operand: an update can write these along with the parameter.
        if own != made == computed and copy not in graph.outputs:
            tensors[copy] = replace(tensors[copy], role=Role.STATE)
            copies[copy] = CopyOf(w)
    remaining = _without(graph, set(copies), set(made_of))
    written = {name for node in remaining for name in node.outputs}
    removed = made_of.keys() - written - copies.keys()
    return replace(
        graph,
        tensors={n: s for n, s in tensors.items() if n not in removed},
        nodes=remaining,
        initializers={**graph.initializers, **copies},
    )


def _without(graph: Graph, copies: set[str], made: set[str]) -> tuple[Node, ...]:
    """Return the nodes, without those that only lead to copies."""
    readers = Counter(name for node in graph.nodes for name in node.inputs)
    remaining = []
    for node in reversed(graph.nodes):
        unread = made.issuperset(node.outputs) and not any(
            readers[name] or name in graph.outputs for name in node.outputs
        )
        if unread or not copies.isdisjoint(node.outputs):
            readers.subtract(node.inputs)
        else:
            remaining.append(node)
    return tuple(reversed(remaining))


def copies_of_parameters(graph: Graph) -> dict[str, str]:
    """Return the copy, kept as state, of each parameter that has a copy."""
    return {
        how.parameter: name
        for name, how in graph.initializers.items()
        if isinstance(how, CopyOf)
    }
