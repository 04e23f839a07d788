"""Let results overwrite inputs that are dead afterwards.

The result becomes an alias of the input, so that a bias, a normalisation's gradient or
an activation function costs no memory. Values do not change: an input is overwritten
only if the node is the last reader of its bytes under any name, the bytes belong to the
step (no data, parameter, state or output) and are as large as the result, and the
kernel supports it (the trait `overwrites`) and reads the bytes through one input only.
"""

from collections.abc import Mapping
from types import MappingProxyType

from mucudnn.ir.graph import Graph
from mucudnn.passes.liveness import KnownTensors, Positions, Use, touches, uses_by


def in_place(graph: Graph) -> Graph:
    """Return the graph with as many results in place as possible."""
    return in_place_with_uses(graph)[0]


def in_place_with_uses(
    graph: Graph,
    touched: tuple[Positions, Positions] | None = None,
    known: KnownTensors | None = None,
) -> tuple[Graph, Mapping[str, Use]]:
    """Return the graph with results in place, and its `uses_of`, in one walk.

    Args:
        graph: The graph.
        touched: Result of `touches`, if known; it is changed.
        known: Facts about tensors from other rewrites of a graph; more are added.
    """
    known = known or KnownTensors()
    tensors, storages = dict(graph.tensors), graph.storages
    positions, writes = touches(graph) if touched is None else touched
    fixed = {storages[name] for name in graph.inputs}
    merged: dict[str, str] = {}  # storage of a result -> storage that it overwrites

    for position, node in enumerate(graph.nodes):
        candidates = node.traits.overwrites
        if not candidates:
            continue
        result = tensors[node.outputs[0]]
        if result.alias is not None:
            continue
        for index in candidates:
            name = node.inputs[index]
            # A storage that took over another's place counts as that one.
            overwritten = storages[name]
            overwritten = merged.get(overwritten, overwritten)
            # The node must be the last and only use; inputs belong to the caller.
            if positions[overwritten][-1] != position or overwritten in fixed:
                continue
            roots = [storages[name] for name in node.tensors]
            roots = [merged.get(storage, storage) for storage in roots]
            spec = tensors[name]
            if (
                roots.count(overwritten) == 1
                and spec.shape == result.shape
                and spec.dtype == result.dtype
                and tensors[overwritten].nbytes == result.nbytes
            ):
                key = result.name, name
                if key not in known.shared:
                    known.shared[key] = result.sharing(name)
                tensors[result.name] = known.shared[key]
                merged[result.name] = overwritten
                # The merged storage lives as long as both.
                positions[overwritten] += positions.pop(result.name)[1:]
                again = writes.pop(result.name, ())
                before = writes.get(overwritten, ())
                same = before[-1:] == again[:1]
                writes[overwritten] = before + (again[1:] if same else again)
                break
    now = {name: merged.get(storage, storage) for name, storage in storages.items()}
    final = graph.with_aliases(MappingProxyType(tensors), now)
    return final, uses_by(final, positions, writes, known)
