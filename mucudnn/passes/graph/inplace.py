"""Let results overwrite inputs that nobody needs any more.

The result becomes another name for the input's bytes, so that a bias, a normalisation's
gradient or an activation function costs no memory. Its values do not change: the input
is overwritten only where this node is the last that reads those bytes under any name,
where they belong to the step (no data, parameter, state or output), where they are as
large as the result, and where the kernel can (the node's trait `overwrites`) and reads
them through that one input alone.
"""

from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, TensorSpec
from mucudnn.passes.liveness import last_uses

__all__ = ["in_place"]


def in_place(graph: Graph) -> Graph:
    """The same graph with as many results in place as can be without changing any."""
    tensors = dict(graph.tensors)
    storage = dict(graph.storages)
    last = last_uses(graph)
    fixed = {storage[name] for name in graph.inputs}

    def root(name: str) -> str:
        found = storage[name]
        while storage[found] != found:
            found = storage[found]
        storage[name] = found
        return found

    def usable(node: Node, index: int, position: int, result: TensorSpec) -> bool:
        taken = root(node.inputs[index])
        spec = tensors[node.inputs[index]]
        return (
            taken not in fixed
            and last[taken] == position
            and (spec.shape, spec.dtype) == (result.shape, result.dtype)
            and tensors[taken].nbytes == result.nbytes
            and [root(name) for name in node.tensors].count(taken) == 1
        )

    for position, node in enumerate(graph.nodes):
        candidates = node.traits.overwrites
        if not candidates or tensors[node.outputs[0]].alias is not None:
            continue
        result = tensors[node.outputs[0]]
        for index in candidates:
            if usable(node, index, position, result):
                taken = root(node.inputs[index])
                tensors[result.name] = replace(result, alias=node.inputs[index])
                storage[result.name] = taken
                last[taken] = last[result.name]
                break
    return graph.with_aliases(MappingProxyType(tensors))
