"""Residency policies of earlier systems.

vDNN offloads the inputs of layers; SuperNeurons offloads the outputs of convolutions
and recomputes the rest; Capuchin ranks tensors by the exposed cost of moving them.
"""

import itertools
from collections.abc import Callable, Mapping

from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.residency import Residency
from mucudnn.passes.graph.recompute_chains import (
    is_checkpoint,
    recompute_ms,
)
from mucudnn.passes.graph.saved_tensors import Saved, saved_tensors
from mucudnn.passes.residency.policy import EVERYTHING, PERSISTENTS, PolicyInput

__all__ = [
    "cost_based",
    "keep_all",
    "lru",
    "paging",
    "superneurons",
    "superneurons_memory",
    "superneurons_speed",
    "vdnn_all",
    "vdnn_conv",
]


def keep_all(step: PolicyInput) -> Mapping[str, Residency]:
    """Keep every tensor; memory is reused by liveness alone."""
    del step
    return {}


def vdnn_all(step: PolicyInput) -> Mapping[str, Residency]:
    """Offload the input of every layer before the classifier (vDNN, section 3.1)."""
    return _offload_inputs(step.graph, convolutions_only=False)


def vdnn_conv(step: PolicyInput) -> Mapping[str, Residency]:
    """Offload the inputs of convolutions: their time hides the copies best."""
    return _offload_inputs(step.graph, convolutions_only=True)


def _offload_inputs(graph: Graph, *, convolutions_only: bool) -> dict[str, Residency]:
    found = {}
    readers = _readers(graph)
    nodes = enumerate(graph.nodes)
    classifier = next((i for i, n in nodes if _classifies(n)), len(graph.nodes))
    for saved in saved_tensors(graph):
        mine = readers.get(saved.name, [])
        if convolutions_only:
            chosen = any(node.traits.convolution for node in mine)
        else:
            chosen = saved.first < classifier and not any(map(_classifies, mine))
        if chosen:
            found[saved.name] = Residency.OFFLOAD
    return found


def _classifies(node: Node) -> bool:
    # A classifier consists of matrix products.
    return node.traits.expensive and not node.traits.convolution


def _readers(graph: Graph) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.phase is Phase.FORWARD:
            for name in node.inputs:
                found.setdefault(graph.storages[name], []).append(node)
    return found


def superneurons(step: PolicyInput) -> Mapping[str, Residency]:
    """Offload checkpoints and recompute the rest by segments (cost-aware).

    A segment is recomputed once if keeping it does not raise the peak above the largest
    working set of one layer, else for every use (SuperNeurons, section 3.4).
    """
    return _superneurons(step, lambda segment, most: segment <= most)


def superneurons_speed(step: PolicyInput) -> Mapping[str, Residency]:
    """Offload checkpoints and recompute every segment once."""
    return _superneurons(step, lambda segment, most: True)


def superneurons_memory(step: PolicyInput) -> Mapping[str, Residency]:
    """Offload checkpoints and recompute everything else for every use."""
    return _superneurons(step, lambda segment, most: False)


def _superneurons(
    step: PolicyInput, once: Callable[[int, int], bool]
) -> dict[str, Residency]:
    graph = step.graph
    tensors = saved_tensors(graph)
    names = {graph.storages[saved.name] for saved in tensors}

    def is_saved(name: str) -> bool:
        return graph.storages[name] in names

    most = max(
        sum(graph.tensors[s].nbytes for s in {graph.storages[t] for t in node.tensors})
        for node in graph.nodes
    )
    found: dict[str, Residency] = {}
    segments: dict[str, list[Saved]] = {}
    for saved in tensors:
        if is_checkpoint(graph, saved.name, is_saved):
            found[saved.name] = Residency.OFFLOAD
        else:
            segments.setdefault(_head(graph, saved.name), []).append(saved)
    for members in segments.values():
        size = sum(saved.nbytes for saved in members)
        mode = Residency.RECOMPUTE if once(size, most) else Residency.RECOMPUTE_EACH
        found.update((saved.name, mode) for saved in members)
    return found


def _head(graph: Graph, tensor: str) -> str:
    """Return the checkpoint before a tensor's segment."""
    node = graph.producers[tensor]
    while not node.traits.expensive and node.inputs:
        if node.inputs[0] not in graph.producers:
            break
        node = graph.producers[node.inputs[0]]
    return node.name


def lru(step: PolicyInput) -> Mapping[str, Residency]:
    """Offload any saved tensor that has no room (SuperNeurons' tensor cache)."""
    return {saved.name: Residency.OFFLOAD for saved in saved_tensors(step.graph)}


def paging(step: PolicyInput) -> Mapping[str, Residency]:
    """Page everything that the running node does not use, parameters included.

    No other policy fits into less memory, and few are slower.
    """
    del step
    return {EVERYTHING: Residency.PAGE, PERSISTENTS: Residency.PAGE}


def cost_based(step: PolicyInput) -> Mapping[str, Residency]:
    """Offload or recompute the tensors with the most free time first.

    The free time of a tensor is the time between its forward and its backward use minus
    two transfers (Capuchin, section 4.4). Tensors are taken in this order until the
    kept ones fit the budget; those with exposed copies are recomputed if that is
    faster.
    """
    graph, profile = step.graph, step.profile
    tensors = saved_tensors(graph)
    clock = [0.0, *itertools.accumulate(profile.node_ms[n.name] for n in graph.nodes)]
    names = {saved.name for saved in tensors}
    total = sum(saved.nbytes for saved in tensors)
    found: dict[str, Residency] = {}

    def moving_ms(saved: Saved) -> float:
        out = saved.nbytes / profile.out_bytes_per_ms
        return out + saved.nbytes / profile.in_bytes_per_ms

    def free_ms(saved: Saved) -> float:
        return clock[saved.again] - clock[saved.last + 1] - moving_ms(saved)

    def again_ms(saved: Saved) -> float:
        return recompute_ms(graph, profile, saved.name, names.__contains__)

    kept = _kept_bytes(step)
    for saved in sorted(tensors, key=free_ms, reverse=True):
        if total <= kept:
            break
        exposed = max(0.0, -free_ms(saved))
        cheap = again_ms(saved) < exposed
        found[saved.name] = Residency.RECOMPUTE if cheap else Residency.OFFLOAD
        total -= saved.nbytes
    return found


def _kept_bytes(step: PolicyInput) -> float:
    """Return the bytes left for saved tensors beside the largest working set."""
    graph = step.graph
    persistent = {spec.name: spec.nbytes for spec in graph.with_role(*PERSISTENT)}
    hosted = step.hosted or frozenset()
    resident = sum(n for name, n in persistent.items() if name not in hosted)
    most = max(
        sum(
            graph.tensors[s].nbytes
            for s in {graph.storages[t] for t in node.tensors}
            if s not in persistent or s in hosted
        )
        for node in graph.nodes
    )
    return max(0.0, step.budget - resident - most)
