"""Let results overwrite inputs that nobody needs any more.

The result becomes another name for the input's bytes, so that a bias, a normalisation's
gradient or an activation function costs no memory. Its values do not change: the input
is overwritten only where this node is the last that reads those bytes under any name,
where they belong to the step (no data, parameter, state or output), where they are as
large as the result, and where the kernel can (the node's trait `overwrites`) and reads
them through that one input alone.
"""

from types import MappingProxyType

from mucudnn.ir.graph import Graph, TensorSpec
from mucudnn.passes.liveness import last_uses

__all__ = ["in_place"]


def in_place(graph: Graph) -> Graph:
    """The same graph with as many results in place as can be without changing any."""
    tensors, storages = dict(graph.tensors), graph.storages
    last = last_uses(graph)
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
                last[taken] == position
                and usable(taken, tensors[name], result)
                and [root(t) for t in node.tensors].count(taken) == 1
            ):
                tensors[result.name] = result.sharing(name)
                merged[result.name] = taken
                last[taken] = last[result.name]
                break
    now = {name: merged.get(storage, storage) for name, storage in storages.items()}
    return graph.with_aliases(MappingProxyType(tensors), now)
