"""Let results overwrite inputs that nobody needs any more.

The result becomes another name for the input's bytes, so that a bias, a normalisation's
gradient or an activation function costs no memory. Its values do not change: the input
is overwritten only where this node is the last that reads those bytes under any name,
where they belong to the step (no data, parameter, state or output), where they are as
large as the result, and where the kernel can (the node's trait `overwrites`) and reads
them through that one input alone.
"""

from collections.abc import Mapping
from types import MappingProxyType

from mucudnn.ir.graph import Graph, TensorSpec
from mucudnn.passes.liveness import Use, touches, uses_by

__all__ = ["in_place", "in_place_with_uses"]


def in_place(graph: Graph) -> Graph:
    """The same graph with as many results in place as can be without changing any."""
    return in_place_with_uses(graph)[0]


def in_place_with_uses(graph: Graph) -> tuple[Graph, Mapping[str, Use]]:
    """The same graph with results in place, and what `uses_of` finds in it.

    Both in one walk: what is in place is used where its own bytes and those that it
    overwrites would have been.
    """
    tensors, storages = dict(graph.tensors), graph.storages
    positions, writes = touches(graph)
    fixed = {storages[name] for name in graph.inputs}
    merged: dict[str, str] = {}  # storage -> the one that it is in now

    def root(name: str) -> str:
        storage = storages[name]
        return merged.get(storage, storage)

    def usable(taken: str, spec: TensorSpec, result: TensorSpec) -> bool:
        return (
            (spec.shape, spec.dtype) == (result.shape, result.dtype)
            and taken not in fixed
            and tensors[taken].nbytes == result.nbytes
        )

    for position, node in enumerate(graph.nodes):
        candidates = node.traits.overwrites
        if not candidates or tensors[node.outputs[0]].alias is not None:
            continue
        result = tensors[node.outputs[0]]
        for index in candidates:
            name = node.inputs[index]
            taken = root(name)
            if (
                positions[taken][-1] == position
                and usable(taken, tensors[name], result)
                and [root(t) for t in node.tensors].count(taken) == 1
            ):
                tensors[result.name] = result.sharing(name)
                merged[result.name] = taken
                positions[taken] += positions.pop(result.name)[1:]
                again = writes.pop(result.name, [])
                before = writes.setdefault(taken, [])
                before += again[1:] if before[-1:] == again[:1] else again
                break
    now = {name: merged.get(storage, storage) for name, storage in storages.items()}
    final = graph.with_aliases(MappingProxyType(tensors), now)
    return final, uses_by(final, positions, writes)
