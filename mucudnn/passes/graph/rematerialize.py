"""Rewrite a graph so that dropped activations are recomputed when needed.

Mostly the backward pass needs them. If a step runs in micro-batches, all slices of a
tensor wait for operations over the whole batch, such as a normalisation's statistics;
then the forward pass may recompute slices as well.

The pass runs before liveness analysis and in-place rewriting, as recomputing a tensor
extends the live ranges of its inputs. A recompute node mutates nothing (a batch norm
does not update running statistics, by its `replay`) and draws the same random numbers.
Nodes that cannot run again, or whose inputs were overwritten since, are not recomputed.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Phase, Saved
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import RECOMPUTED, Residency
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.graph.split import aliased, of_whole

_MOST_MADE = 50_000
"""Limit of remembered nodes of one graph."""


@dataclass(frozen=True, slots=True)
class Insertions:
    """Differences of a rewritten graph from the graph that it was made of.

    Attributes:
        copies: Positions of the inserted nodes, ascending.
        rebound: Positions, before and after, of the nodes that read copies instead.
    """

    copies: Sequence[int] = ()
    rebound: Sequence[tuple[int, int]] = ()


class Rematerializer:
    """Rewriter of one graph for many residencies, with cached facts about the graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[object, tuple[Node, tuple[TensorSpec, ...]]] = {}

    def __call__(self, residency: Mapping[str, Residency]) -> Graph:
        """Copy the producers of recomputed tensors to just before their backward uses.

        With `RECOMPUTE` one copy serves all later uses. With `RECOMPUTE_EACH` every
        backward reader has a copy of its own, with its whole recompute chain. With
        `RECOMPUTE_ALWAYS` so does every forward reader of a slice except the first,
        unless the reader's results share bytes with its inputs.
        """
        return self.rewrite(residency)[0]

    def rewrite(
        self, residency: Mapping[str, Residency]
    ) -> tuple[Graph, Insertions | None]:
        """Return the rewritten graph, and how it differs from this one.

        The differences are None if tensors of this graph have other storages.
        """
        if not any(choice in RECOMPUTED for choice in residency.values()):
            return self.graph, Insertions()  # unsaved tensors are read by copies only
        rewriter, done = _Rewriter(self, residency), 0
        copies: list[int] = []
        rebound: list[tuple[int, int]] = []
        for position in rewriter.reader_positions():
            node = self.graph.nodes[position]
            rewriter.nodes += self.graph.nodes[done:position]
            before = len(rewriter.nodes)
            rewriter.visit(node, position)
            now = len(rewriter.nodes) - 1
            copies += range(before, now)
            if rewriter.nodes[now] is not node:
                rebound.append((position, now))
            done = position + 1
        rewriter.nodes += self.graph.nodes[done:]
        known = Insertions(copies, rebound) if rewriter.same_views else None
        return rewriter.build(), known

    def remember(
        self, key: object, node: Node, specs: tuple[TensorSpec, ...] = ()
    ) -> tuple[Node, tuple[TensorSpec, ...]]:
        """Store a node and its results, which most rewrites share, and return them."""
        if len(self.made) >= _MOST_MADE:
            self.made.clear()
        self.made[key] = found = node, specs
        return found

    def dropped(self, residency: Mapping[str, Residency]) -> set[str]:
        """Return tensors that may be dropped or replaced before they are read again."""
        kept = [n for n, choice in residency.items() if choice not in RECOMPUTED]
        named = self.unsaved.intersection(kept)
        lost = self.unsaved.difference(named) if named else self.unsaved
        return {*lost, *self.results(residency, RECOMPUTED)}

    def results(
        self, residency: Mapping[str, Residency], choices: Collection[Residency]
    ) -> set[str]:
        """Return all results of nodes with a result in one of these residencies."""
        found: set[str] = set()
        for storage, choice in residency.items():
            if choice in choices:
                found.update(self._results_of_makers.get(storage, ()))
        return found

    @cached_property
    def unsaved(self) -> frozenset[str]:
        """Results of forward nodes that have a result no backward node reads."""
        storages, saved = self.graph.storages, self.saved
        return frozenset(
            name
            for node in self.graph.nodes
            if node.phase is Phase.FORWARD
            and any(storages[output] not in saved for output in node.outputs)
            for name in node.outputs
        )

    @cached_property
    def saved(self) -> frozenset[str]:
        """Names of the graph's saved tensors."""
        return frozenset(tensor.name for tensor in self.graph.saved)

    @cached_property
    def makers(self) -> Mapping[str, Node]:
        """Node that recomputes each recomputable tensor of the forward pass.

        Views in the backward pass are recomputed with the storage that they share.
        """
        producers, storages, found = self.graph.producers, self.graph.storages, {}
        for node in self.graph.nodes:
            again = node.recompute_node or node
            for name in node.outputs if node.recomputable else ():
                owner = producers.get(storages[name])
                forward = owner is None or owner.phase is Phase.FORWARD
                if forward and node.remakes(name):
                    found[name] = again
        return found

    @cached_property
    def readers(self) -> Mapping[Phase, Mapping[str, tuple[int, ...]]]:
        """Positions of the readers of each tensor, by phase."""
        found: dict[Phase, dict[str, list[int]]] = {phase: {} for phase in Phase}
        for position, node in enumerate(self.graph.nodes):
            of_phase = found[node.phase]
            for name in node.inputs:
                of_phase.setdefault(name, []).append(position)
        return {
            phase: {name: tuple(positions) for name, positions in of_phase.items()}
            for phase, of_phase in found.items()
        }

    @cached_property
    def changing(self) -> Mapping[str, tuple[int, tuple[str, ...]]]:
        """Position of each tensor's producer, and its inputs that are ever overwritten.

        Tensors whose producers read no such input are omitted.
        """
        storages, found = self.graph.storages, {}
        changed = {s for names in self.graph.overwritten.values() for s in names}
        for position, node in enumerate(self.graph.nodes):
            read = (storages[t] for t in node.inputs if t not in node.mutates)
            if names := tuple(storage for storage in read if storage in changed):
                found.update(dict.fromkeys(node.outputs, (position, names)))
        return found

    @cached_property
    def _results_of_makers(self) -> Mapping[str, tuple[str, ...]]:
        """All results of the nodes with a result in each storage."""
        storages = self.graph.storages
        found: dict[str, tuple[str, ...]] = {}
        for node in self.graph.nodes:
            for storage in dict.fromkeys(storages[name] for name in node.outputs):
                found[storage] = found.get(storage, ()) + node.outputs
        return found


class _Rewriter:
    """A graph being rewritten for one choice of residencies."""

    def __init__(
        self, known: Rematerializer, residency: Mapping[str, Residency]
    ) -> None:
        graph = known.graph
        self._tensors: dict[str, TensorSpec] = dict(graph.tensors)
        self._storages: dict[str, str] = dict(graph.storages)
        self.same_views = True
        self.nodes: list[Node] = []
        self._graph = graph
        self._residency = residency
        self._facts = known
        self._copies: dict[str, str] = {}
        self._count = 0
        self._dropped = known.dropped(residency)
        always = known.results(residency, (Residency.RECOMPUTE_ALWAYS,))
        self._always = {name for name in always if of_whole(name) != name}
        self._read: set[str] = set()  # dropped tensors the forward pass has read once
        self._phase, self._now = Phase.FORWARD, 0

    def reader_positions(self) -> list[int]:
        """Return positions of the nodes that may need recomputed inputs, ascending."""
        phases = [Phase.FORWARD] if self._always else []
        found: set[int] = set()
        for phase in (*phases, Phase.BACKWARD):
            readers = self._facts.readers[phase]
            found.update(*(readers.get(name, ()) for name in self._dropped))
        return sorted(found)

    def build(self) -> Graph:
        """Return the rewritten graph after all nodes were visited."""
        storages = self._storages if self.same_views else None
        tensors = MappingProxyType(self._tensors)
        return self._graph.with_more_nodes(tensors, tuple(self.nodes), storages)

    def visit(self, node: Node, now: int) -> None:
        """Append a node that reads dropped tensors, behind their recomputation."""
        self._phase, self._now, read = node.phase, now, node.inputs
        if node.phase is Phase.BACKWARD:
            node = self._with_recomputed_inputs(node, self._dropped)
        else:
            aliases = (self._tensors[output].alias for output in node.outputs)
            own_bytes = not node.mutates and not any(aliases)
            if own_bytes and not self._always.isdisjoint(read):
                node = self._with_recomputed_inputs(node, self._always)
            self._read.update(self._dropped.intersection(read))
        self.nodes.append(node)

    def _with_recomputed_inputs(self, node: Node, dropped: Collection[str]) -> Node:
        """Return a node that reads copies of dropped tensors, emitted before it."""
        mine: dict[str, str] = {}
        inputs = tuple(
            [
                self._recompute(name, mine) if name in dropped else name
                for name in node.inputs
            ]
        )
        if inputs == node.inputs:
            return node
        # A result that aliases a recomputed input shares the storage of the copy.
        for spec in (self._tensors[output] for output in node.outputs):
            alias = self._alias(node, spec, inputs)
            if alias != spec.alias:
                self._tensors[spec.name] = spec.sharing(alias)
                self.same_views = False
        key, facts = (node.name, inputs), self._facts
        if key not in facts.made:
            facts.remember(key, replace(node, inputs=inputs))
        return facts.made[key][0]

    def _recompute(self, name: str, mine: dict[str, str]) -> str:
        """Return a tensor or its recomputed copy; `mine` are this node's copies."""
        if name in self._copies:
            return self._copies[name]
        known = self._copy_map(name, self._copies, mine)
        if known is None:
            return name
        dropped, makers = self._dropped, self._facts.makers
        pending = [(name, known)]
        # A stack instead of recursion: chains may be as long as the network.
        while pending:
            top, known = pending[-1]
            if top in known:
                pending.pop()
                continue
            node = makers[top]
            inputs: list[str] = []
            missing: list[tuple[str, dict[str, str]]] = []
            for tensor in node.inputs:
                copies = (
                    self._copy_map(tensor, known, mine) if tensor in dropped else None
                )
                if copies is None:
                    inputs.append(tensor)
                elif tensor in copies:
                    inputs.append(copies[tensor])
                else:
                    missing.append((tensor, copies))
            if missing:
                pending += reversed(missing)
            else:
                self._copy(node, tuple(inputs), known)
        return known[name]

    def _copy_map(
        self, name: str, dependents: dict[str, str], mine: dict[str, str]
    ) -> dict[str, str] | None:
        """Return the mapping that holds a tensor's copy; None to read the original.

        A tensor that no backward node reads is freed after the forward pass and is
        recomputed for its dependents. Within the forward pass the original is
        resident until it has been read once.

        Args:
            name: Name of a dropped tensor.
            dependents: Mapping with the copies of the tensor's dependents.
            mine: Mapping with copies that only one node reads.
        """
        if name in self._copies:
            return self._copies
        facts = self._facts
        if name not in facts.makers or (
            name in facts.changing and self._inputs_changed(name)
        ):
            return None
        within = self._phase is Phase.FORWARD
        if within and name not in self._read:
            return None
        storage = self._graph.storages[name]
        choice = self._residency.get(storage)
        if choice is Residency.RECOMPUTE:
            return None if within else self._copies
        if choice in RECOMPUTED:
            return mine if name in self._always or not within else None
        forward = self._graph.producers[name].phase is Phase.FORWARD
        return dependents if forward and storage not in facts.saved else None

    def _inputs_changed(self, name: str) -> bool:
        """Return whether a producer's inputs (such as weights) changed since it ran."""
        first, storages = self._facts.changing[name]
        return any(
            first <= position < self._now
            for storage in storages
            for position in self._graph.overwriting[storage]
        )

    def _copy(self, node: Node, inputs: tuple[str, ...], known: dict[str, str]) -> None:
        self._count += 1
        facts, storages, tensors = self._facts, self._storages, self._tensors
        key = node.name, self._count, inputs, self._phase is Phase.BACKWARD
        made = facts.made.get(key)
        copy, specs = made or facts.remember(key, *self._new_copy(node, inputs))
        for output, spec in zip(node.outputs, specs, strict=True):
            name = spec.name
            tensors[name] = spec
            storages[name] = name if spec.alias is None else storages[spec.alias]
            known[output] = name
        self.nodes.append(copy)

    def _new_copy(
        self, node: Node, inputs: tuple[str, ...]
    ) -> tuple[Node, tuple[TensorSpec, ...]]:
        suffix = f"~{self._count}"
        specs = tuple(
            spec.again(output + suffix, self._alias(node, spec, inputs))
            for output in node.outputs
            for spec in [self._graph.tensors[output]]
        )
        attrs = node.attrs
        if node.traits.replay:
            attrs = MappingProxyType({**attrs, **dict(node.traits.replay)})
        copy = Node(
            node.name + suffix,
            node.op,
            inputs,
            tuple(spec.name for spec in specs),
            attrs,
            self._phase,
            traits=node.traits,
        )
        return copy, specs

    def _alias(
        self, node: Node, spec: TensorSpec, inputs: tuple[str, ...]
    ) -> str | None:
        """Return the alias of a result if its node reads these inputs."""
        if spec.alias is None:
            return None
        return aliased(self._graph, spec.alias, node, inputs) or spec.alias


def recompute_chain(
    graph: Graph, tensor: str, available: Callable[[str], bool]
) -> tuple[Node, ...]:
    """Return the nodes to run again, in order, to recompute a tensor.

    Args:
        graph: A training graph.
        tensor: The dropped tensor.
        available: Whether a storage is resident when the tensor is needed again.
            Inputs, parameters and tensors that cannot be recomputed always are.
    """
    needed: dict[str, Node] = {}
    pending = [tensor]
    while pending:
        name = pending.pop()
        node = graph.producers.get(name)
        if node is None or node.name in needed or not node.remakes(name):
            continue
        if name != tensor and available(graph.storages[name]):
            continue
        needed[node.name] = node
        pending += node.inputs
    return tuple(sorted(needed.values(), key=lambda node: graph.positions[node.name]))


def recompute_ms(
    graph: Graph, profile: Profile, tensor: str, available: Callable[[str], bool]
) -> float:
    """Return the time of a recompute chain; infinity if there is none."""
    if not graph.producers[tensor].remakes(tensor):
        return math.inf
    chain = recompute_chain(graph, tensor, available)
    return sum(profile.recompute_ms_of(node.name) for node in chain)


@dataclass(frozen=True, slots=True)
class RecomputeChains:
    """Recompute chains and narrow results of a training graph.

    Most intermediate results are needed for one saved tensor only, and run again with
    it. *Narrow* results may be kept instead: those that are smaller than the saved
    tensor, such as the inputs of a concatenation, or that several of them need.

    Attributes:
        chains: Saved or narrow tensor -> positions and nodes that recompute it, the
            last first. Their inputs are saved, narrow, or results of the same chain.
        narrow: Narrow result -> the last position at which a tensor recomputed from it
            is used.
        wide: Narrow result -> the saved tensors that are recomputed from it.
    """

    chains: Mapping[str, Sequence[tuple[int, Node]]]
    narrow: Mapping[str, int]
    wide: Mapping[str, frozenset[str]]


def recompute_chains(graph: Graph, least_bytes: float = 0.0) -> RecomputeChains:
    """Find the recompute chains and the narrow results of a graph.

    Of a node with several results, only the chain of the largest includes it.

    Args:
        graph: A training graph.
        least_bytes: Size below which narrow results are neglected: they end a chain
            like kept tensors.
    """
    saved = {tensor.name: tensor for tensor in graph.saved}
    size = {name: spec.nbytes for name, spec in graph.tensors.items()}
    chains: dict[str, list[tuple[int, Node]]] = {}
    narrow: dict[str, int] = {}
    wide: dict[str, frozenset[str]] = {name: frozenset({name}) for name in saved}
    owners: dict[str, set[str]] = {}  # intermediate result -> tensors it is needed for
    for position in reversed(range(len(graph.nodes))):
        node = graph.nodes[position]
        if node.phase is not Phase.FORWARD or node.traits.view:
            continue
        found = []
        for name in filter(node.remakes, node.outputs):
            owner, *others = [name] if name in saved else owners.get(name, [""])
            if not owner or (name not in saved and size[name] < least_bytes):
                continue
            if others or size[name] < size[owner]:
                narrow[name] = max(
                    narrow.get(tensor, graph.reads[tensor][-1])
                    for tensor in (owner, *others)
                )
                wide[name] = frozenset().union(*(wide[t] for t in (owner, *others)))
                owner = name
            found.append((size[name], owner))
        if found:
            _, owner = max(found)
            again = node.recompute_node or node
            chains.setdefault(owner, []).append((position, again))
            for storage in (graph.storages[name] for name in again.inputs):
                if storage not in saved:
                    owners.setdefault(storage, set()).add(owner)
    return RecomputeChains(chains, narrow, {name: wide[name] for name in narrow})


def is_checkpoint(graph: Graph, tensor: str, saved: Callable[[str], bool]) -> bool:
    """Return whether a tensor's bytes are worth saving rather than recomputing.

    Checkpoints are results of expensive nodes and joins of branches, results that
    overwrite them in place, and results that cannot be recomputed.
    """
    while True:
        node = graph.producers.get(tensor)
        if node is None or not node.recomputable:
            return True
        if node.traits.expensive or node.traits.joins_branches:
            return True
        # Go on with the input whose bytes the result shares, or could share.
        if node.traits.view:
            storages = graph.storages
            same = (t for t in node.inputs if storages[t] == storages[tensor])
            tensor = next(same)
        elif node.traits.overwrites and tensor == node.outputs[0]:
            tensor = node.inputs[node.traits.overwrites[0]]
        else:
            return False
        if saved(tensor):
            return False


def saved_tensors(graph: Graph) -> tuple[Saved, ...]:
    """Return the forward results that backward nodes read, in order of production."""
    return graph.saved
