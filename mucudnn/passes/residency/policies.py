"""The residency policy protocol, and every policy that ships.

A policy is a function of a training graph and its profile that chooses tensors to
offload or recompute; all other tensors are kept. Whether that fits a budget is decided
by the scheduler.

Activations are offloaded between their last forward and first backward use. Parameters
and optimizer state outlive the step, so their gaps are cyclic, from the last use in one
step to the first use in the next.
"""

import itertools
import math
from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase, Saved
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Residency
from mucudnn.ir.tensor import Role
from mucudnn.passes.graph.rematerialize import is_checkpoint, recompute_ms
from mucudnn.passes.registry import ALL, Strategies, name_of

EVERYTHING = "*"
"""Key for all storages made by a step that a policy does not name."""

PERSISTENTS = "*persistent"
"""Key for all parameters and state that a policy does not name, except `SMALL` ones,
whose copies would be many and free next to nothing."""

SMALL = 64 << 10
"""Size in bytes; in a small model, 1/1024 of all parameters and state."""


class PolicyInput(Protocol):
    """Input of a policy: a `StepRequest`, or any object with these properties."""

    @property
    def graph(self) -> Graph:
        """A training graph before in-place rewriting."""
        ...

    @property
    def profile(self) -> Profile:
        """Costs of the graph."""
        ...

    @property
    def budget(self) -> float:
        """Budget for everything in bytes; infinity without a limit."""
        ...

    @property
    def hosted(self) -> frozenset[str] | None:
        """Parameters and state that are host-resident, if decided."""
        ...


class ResidencyPolicy(Protocol):
    """A function that chooses residencies."""

    def __call__(self, step: PolicyInput) -> Mapping[str, Residency]:
        """Return residencies of tensors; missing tensors are kept."""
        ...


# Residency policies of earlier systems.
#
# vDNN offloads the inputs of layers; SuperNeurons offloads the outputs of convolutions
# and recomputes the rest; Capuchin ranks tensors by the exposed cost of moving them.


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
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.phase is Phase.FORWARD:
            for name in node.inputs:
                readers.setdefault(graph.storages[name], []).append(node)
    nodes = enumerate(graph.nodes)
    # The classifier and all behind it is left alone, as in vDNN.
    classifier = next((i for i, n in nodes if _classifies(n)), len(graph.nodes))
    for saved in graph.saved:
        mine = readers.get(saved.name, [])
        if convolutions_only:
            chosen = any(node.traits.convolution for node in mine)
        else:
            chosen = saved.first < classifier and not any(map(_classifies, mine))
        if chosen:
            found[saved.name] = Residency.OFFLOAD
    return found


def _classifies(node: Node) -> bool:
    """Return whether a node is a matrix product, of which classifiers consist."""
    return node.traits.expensive and not node.traits.convolution


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
    tensors = graph.saved
    names = {graph.storages[saved.name] for saved in tensors}

    def is_saved(name: str) -> bool:
        return graph.storages[name] in names

    # The largest working set of a node is what a segment is compared with.
    most = _largest_working_set(graph, graph.tensors)
    found = dict.fromkeys(passing_block_ends(graph), Residency.OFFLOAD)
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
    return {saved.name: Residency.OFFLOAD for saved in step.graph.saved}


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
    tensors = graph.saved
    clock = [0.0, *itertools.accumulate(profile.node_ms[n.name] for n in graph.nodes)]
    names = {saved.name for saved in tensors}
    total = sum(saved.nbytes for saved in tensors)
    found: dict[str, Residency] = {}

    def free_ms(saved: Saved) -> float:
        out = saved.nbytes / profile.out_bytes_per_ms
        copies = out + saved.nbytes / profile.in_bytes_per_ms
        return clock[saved.again] - clock[saved.last + 1] - copies

    kept = _kept_bytes(step)
    for saved in sorted(tensors, key=free_ms, reverse=True):
        if total <= kept:
            break
        exposed = max(0.0, -free_ms(saved))
        cheap = recompute_ms(graph, profile, saved.name, names.__contains__) < exposed
        found[saved.name] = Residency.RECOMPUTE if cheap else Residency.OFFLOAD
        total -= saved.nbytes
    return found


def _kept_bytes(step: PolicyInput) -> float:
    """Return the bytes left for saved tensors beside the largest working set."""
    graph = step.graph
    hosted = step.hosted or frozenset()
    resident = [s for s in graph.with_role(*PERSISTENT) if s.name not in hosted]
    others = graph.tensors.keys() - {spec.name for spec in resident}
    fixed = sum(spec.nbytes for spec in resident)
    return max(0.0, step.budget - fixed - _largest_working_set(graph, others))


def _largest_working_set(graph: Graph, counted: Container[str]) -> int:
    """Return the most bytes of these storages that one node uses."""
    size = {n: t.nbytes if n in counted else 0 for n, t in graph.tensors.items()}
    storage = graph.storages.__getitem__
    used = ({*map(storage, node.tensors)} for node in graph.nodes)
    return max(sum(map(size.__getitem__, storages)) for storages in used)


# Checkpointing, as it is done by hand for deep models.
#
# A block ends at a sum (or another join) of a branch that began some nodes before, such
# as a residual connection. Networks without joins are divided into segments, as many
# as the square root of the number of their activations (Chen et al. 2016).


_FAR = 8
"""Distance of two operands' producers from which a node joins branches."""

_WORTH = 1e-5
"""Fraction of a step's activations below which results are no ends of blocks."""


def checkpoint_blocks(step: PolicyInput) -> Mapping[str, Residency]:
    """Keep the results of blocks and recompute everything else."""
    return _checkpointed(step, block_ends(step.graph), Residency.KEEP)


def offload_checkpoints(step: PolicyInput) -> Mapping[str, Residency]:
    """Offload the results of blocks and recompute everything else."""
    return _checkpointed(step, block_ends(step.graph), Residency.OFFLOAD)


def selective_checkpointing(step: PolicyInput) -> Mapping[str, Residency]:
    """Keep results of matrix products, attention and convolutions; recompute others.

    This is the default of operator-level selective checkpointing in PyTorch.
    """
    saved = step.graph.saved
    kept = frozenset(s.name for s in saved if s.producer.traits.expensive)
    return _checkpointed(step, kept, Residency.KEEP)


def checkpoint_some_blocks(step: PolicyInput) -> Mapping[str, Residency]:
    """Checkpoint every n-th block, as few as fit (torchtitan's per-layer option)."""
    ends = block_ends(step.graph)
    found = _checkpointed(step, ends, Residency.KEEP)
    blocks: list[list[Saved]] = [[]]
    for saved in step.graph.saved:
        blocks[-1].append(saved)
        if saved.name in ends:
            blocks.append([])
    sizes = [sum(s.nbytes for s in block if s.name in found) for block in blocks]
    # One block at a time is recomputed as a whole: its results need room, too.
    room = _kept_bytes(step) - max(sizes)
    if sum(sizes) <= room + max(sizes):
        return {}
    for every in (4, 3, 2):
        if sum(n for i, n in enumerate(sizes) if (i + 1) % every) <= room:
            again = itertools.chain(*blocks[every - 1 :: every])
            some = {saved.name for saved in again}
            return {n: r for n, r in found.items() if n in some or n in ends}
    return found


def knapsack(step: PolicyInput) -> Mapping[str, Residency]:
    """Keep what takes the longest to recompute per byte, as much as fits.

    This is PyTorch's `activation_memory_budget`, at the fraction that the budget has
    room for beside the largest working set and the results of one block.
    """
    graph, profile = step.graph, step.profile
    everything = _checkpointed(step, frozenset(), Residency.KEEP)
    tensors = [s for s in graph.saved if s.name in everything]
    names = {saved.name for saved in graph.saved}
    most = largest = 0
    # The results between two block ends are recomputed together.
    ends = block_ends(graph)
    for saved in tensors:
        most = saved.nbytes if saved.name in ends else most + saved.nbytes
        largest = max(largest, most)
    total, room = sum(s.nbytes for s in tensors), _kept_bytes(step)
    if total <= room:
        return {}

    def ms_per_byte(saved: Saved) -> float:
        again = recompute_ms(graph, profile, saved.name, names.__contains__)
        return again / max(1, saved.nbytes)

    room -= largest
    for saved in sorted(tensors, key=ms_per_byte, reverse=True):
        if saved.nbytes <= room:
            room -= saved.nbytes
            del everything[saved.name]
    return everything


def block_ends(graph: Graph) -> frozenset[str]:
    """Return the results of blocks; see above."""
    saved = [s.name for s in graph.saved]
    if joins := [name for name in saved if joins_branches(graph, name)]:
        return frozenset(joins)
    # Operations of other frameworks do not say that they join branches.
    forward = [node for node in graph.nodes if node.phase is Phase.FORWARD]
    specs = {t: graph.tensors[t] for node in forward for t in node.outputs}
    sizes = {
        name: spec.nbytes
        for name, spec in specs.items()
        if spec.alias is None and spec.role is Role.ACTIVATION
    }
    least = _WORTH * sum(sizes.values())
    big = {name for name, nbytes in sizes.items() if nbytes > least}
    for node in forward:
        read = {graph.storages[t] for t in node.inputs} & big
        made = [graph.positions[graph.producers[t].name] for t in read]
        if node.traits.view or node.traits.expensive or not made:
            continue
        if max(made) - min(made) >= _FAR:
            joins += (t for t in node.outputs if t in big)
    segments = [name for name in saved if name in big]
    return frozenset(joins or segments[:: math.isqrt(len(segments)) or 1])


def passing_block_ends(graph: Graph) -> list[str]:
    """Return results of blocks that only the forward pass reads.

    Residual sums in low precision are such. Unless they stay or are offloaded, whatever
    is recomputed from them is recomputed from the step's first node on.
    """
    fixed = graph.immovable | {saved.name for saved in graph.saved}
    return sorted(block_ends(graph) - fixed)


def joins_branches(graph: Graph, tensor: str) -> bool:
    """Return whether a tensor is the join of branches, or overwrites it in place."""
    node = graph.producers[tensor]
    while not node.traits.joins_branches:
        if not node.traits.overwrites or node.traits.expensive:
            return False
        source = node.inputs[node.traits.overwrites[0]]
        if source not in graph.producers:
            return False
        node = graph.producers[source]
    return True


def _checkpointed(
    step: PolicyInput, ends: frozenset[str], choice: Residency
) -> dict[str, Residency]:
    """Return a choice for some tensors, and recompute all others that can be."""
    graph = step.graph
    found = {
        name: choice
        for name in graph.tensors
        if name in ends and name not in graph.immovable
    }
    for saved in graph.saved:
        node = saved.producer
        if saved.name not in ends and node.recomputable and node.remakes(saved.name):
            found[saved.name] = Residency.RECOMPUTE
    return found


PLANNED = "planned"
"""Policy that searches, starting from all other policies."""

VDNN_DYN = "vdnn_dyn"
"""Policy that uses the first of vDNN's configurations that fits."""

POLICIES: Strategies[ResidencyPolicy] = Strategies(
    "residency policy",
    (
        keep_all,
        vdnn_all,
        vdnn_conv,
        superneurons,
        superneurons_speed,
        superneurons_memory,
        lru,
        paging,
        cost_based,
        checkpoint_blocks,
        checkpoint_some_blocks,
        selective_checkpointing,
        offload_checkpoints,
        knapsack,
    ),
    group="mucudnn.policies",
    reserved=(ALL, PLANNED, VDNN_DYN),
)
"""Residency policies by name; `register` or an entry point of the group adds more.

`planned` and `vdnn_dyn` decide more than residencies: see `passes.planning`.
"""


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies."""
    return (PLANNED, VDNN_DYN, *POLICIES.names)


def check_policy(policy: str | ResidencyPolicy) -> None:
    """Raise a `ValueError` for an unknown name, a `TypeError` for another value."""
    if isinstance(policy, str):
        if policy in (PLANNED, VDNN_DYN) or policy in POLICIES.table:
            return
        names = policy_names()
        if policy not in names:
            valid = ", ".join(sorted(names))
            raise ValueError(f"unknown policy {policy!r}; choose one of: {valid}")
    POLICIES.resolve(policy)


def decide(policy: str | ResidencyPolicy, step: PolicyInput) -> Mapping[str, Residency]:
    """Run a policy, possibly a user's, and check its residencies.

    Raises:
        TypeError: The policy did not return a mapping of residencies.
        ValueError: The policy is unknown, or names an unknown tensor.
    """
    name = f"residency policy {name_of(policy)!r}"
    found: object = POLICIES.resolve(policy)(step)
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{name} returned {found!r}; it must return a mapping from names of "
            "tensors to Residency, such as {} to keep everything"
        )
    check_residencies(name, found, step.graph)
    return found


def check_residencies(whose: str, found: Mapping[Any, object], graph: Graph) -> None:
    """Raise a `ValueError` for unknown tensors, a `TypeError` for invalid values."""
    for tensor, choice in found.items():
        if tensor not in graph.tensors and tensor not in (EVERYTHING, PERSISTENTS):
            raise ValueError(
                f"{whose} names {tensor!r}, which is not a tensor of the step; "
                "saved_tensors(step.graph) lists those that can be offloaded or "
                "recomputed"
            )
        if not isinstance(choice, Residency):
            valid = ", ".join(f"Residency.{r.name}" for r in Residency)
            raise TypeError(
                f"{whose} has {choice!r} for {tensor!r}; choose one of: {valid}"
            )
