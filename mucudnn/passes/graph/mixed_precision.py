"""Mixed precision: convolutions and matrix products in a narrow type, the rest not.

Parameters, activations between other operations, gradients of parameters and updates
stay in the network's own type; what a convolution reads is cast before it and what it
computes is cast back (Micikevicius et al. 2018). The backward pass follows from the
forward one, so its convolutions are narrow as well.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import make_node
from mucudnn.ir.tensor import TensorSpec

__all__ = ["LOSS_SCALES", "lowered"]

LOSS_SCALES: Mapping[str, float] = MappingProxyType(
    {"float16": 1024.0, "bfloat16": 1.0}
)
"""Narrow type -> what the loss is multiplied by, so that small gradients survive."""


def lowered(graph: Graph, dtype: str) -> Graph:
    """A forward graph whose convolutions and products compute in another type.

    Args:
        graph: A network, without its backward pass.
        dtype: `float16` or `bfloat16`.

    Raises:
        ValueError: It is another type.
    """
    if dtype not in LOSS_SCALES:
        valid = ", ".join(LOSS_SCALES)
        raise ValueError(f"unknown narrow type {dtype!r}; choose one of: {valid}")
    tensors: dict[str, TensorSpec] = dict(graph.tensors)
    nodes: list[Node] = []
    narrow: dict[str, str] = {}

    def cast(source: str, spec: TensorSpec) -> str:
        tensors[spec.name] = spec
        name = f"{spec.name}:cast"
        nodes.append(make_node(tensors, name, "cast", (source,), (spec.name,)))
        return spec.name

    def narrowed(name: str) -> str:
        if name not in narrow:
            spec = TensorSpec(f"{name}:{dtype}", tensors[name].shape, dtype)
            narrow[name] = cast(name, spec)
        return narrow[name]

    for node in graph.nodes:
        if not node.traits.expensive:
            nodes.append(node)
            continue
        inputs = tuple(narrowed(name) for name in node.inputs)
        wide = tensors[node.outputs[0]]
        result = TensorSpec(f"{wide.name}:{dtype}", wide.shape, dtype)
        tensors[result.name] = result
        narrow[wide.name] = result.name
        attrs = dict(node.attrs)
        if node.op == "conv":
            attrs["problem"] = replace(attrs["problem"], dtype=dtype)
        nodes.append(
            replace(
                node,
                inputs=inputs,
                outputs=(result.name,),
                attrs=MappingProxyType(attrs),
            )
        )
        cast(result.name, wide)
    return replace(graph, tensors=MappingProxyType(tensors), nodes=tuple(nodes))
