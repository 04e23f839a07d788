"""What is known of a node's cost without running it."""

from collections.abc import Mapping

from mucudnn.ir.graph import Node
from mucudnn.passes.liveness import rounded
from mucudnn.torch.execution.random_states import generator_of
from mucudnn.torch.lowering.lowered import NOTHING, Lowered

__all__ = ["is_view", "workspaces_of"]

_STATE_BYTES = 2 * rounded(5056)
"""Of the CPU generator's state, twice: it is read, and what was there is put back."""


def is_view(lowered: Lowered, node: Node) -> bool:
    """Whether a node only gives other names to bytes that are there."""
    if lowered.calls[node.name] is NOTHING:
        return True
    aliases = [lowered.graph.tensors[name].alias for name in node.outputs]
    return bool(aliases) and not node.mutates and None not in aliases


def workspaces_of(lowered: Lowered, scratch: Mapping[str, int]) -> dict[str, int]:
    """Scratch memory by node: what was measured, and states of the generator."""
    found = {name: nbytes for name, nbytes in scratch.items() if nbytes}
    for node in lowered.graph.nodes:
        random = lowered.calls[node.name].random
        if random and generator_of(lowered, node.name) is None:
            found[node.name] = found.get(node.name, 0) + _STATE_BYTES
    return found
