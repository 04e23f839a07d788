"""Rewrite a graph so that dropped activations are computed again when needed.

Mostly the backward pass needs them. Where a step runs in parts, all slices of a tensor
wait for what needs the whole batch, such as a normalisation's statistics: then the
forward pass may compute them again as well.

This runs before liveness and before anything is made in-place: recomputing a tensor
lengthens the lives of its inputs. A copy mutates nothing (a batch norm's leaves the
running statistics alone, by its `replay`), and one that draws random numbers draws the
same. What cannot run again, or reads what has been overwritten since, is kept.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Phase, TensorSpec
from mucudnn.ir.residency import RECOMPUTED, Residency
from mucudnn.passes.graph.saved_tensors import saved_tensors
from mucudnn.passes.graph.slicing.rows import of_whole

__all__ = ["Rematerializer", "rematerialize"]


def rematerialize(
    graph: Graph,
    residency: Mapping[str, Residency],
    saved: Collection[str] | None = None,
) -> Graph:
    """Copy the producers of recomputed tensors to just before their backward uses.

    With `RECOMPUTE` the copy serves all later uses; with `RECOMPUTE_EACH` every
    backward node that needs it has a copy of its own, and of what that needs. With
    `RECOMPUTE_ALWAYS` so has every forward node but the first that reads a slice of a
    tensor, unless results of that share bytes with what it reads.

    Args:
        graph: A training graph that nothing has made in-place yet.
        residency: Of saved tensors.
        saved: Names of the graph's saved tensors, if they are known.
    """
    return Rematerializer(graph, saved)(residency)


class Rematerializer:
    """Rewrites one graph time and again; what it is like is found out once.

    Args:
        graph: A training graph that nothing has made in-place yet.
        saved: Names of its saved tensors, if they are known.
    """

    def __init__(self, graph: Graph, saved: Collection[str] | None = None) -> None:
        self.graph = graph
        self._saved = saved

    def __call__(self, residency: Mapping[str, Residency]) -> Graph:
        """The graph with what residencies compute again: see `rematerialize`."""
        if not any(choice in RECOMPUTED for choice in residency.values()):
            return self.graph
        rewriter, done = _Rewriter(self, residency), 0
        for position in rewriter.reading():
            rewriter.pass_over(self.graph.nodes[done:position])
            rewriter.visit(self.graph.nodes[position], position)
            done = position + 1
        rewriter.pass_over(self.graph.nodes[done:])
        return rewriter.found()

    def dropped(self, residency: Mapping[str, Residency]) -> set[str]:
        """Tensors that may not be there, or be there anew, when they are read again.

        Of a node that runs again all results are new.
        """
        return {*self.gone, *self.results(residency, RECOMPUTED)}

    def results(
        self, residency: Mapping[str, Residency], choices: Collection[Residency]
    ) -> set[str]:
        """All results of the nodes that write tensors with one of some residencies."""
        found: set[str] = set()
        for storage, choice in residency.items():
            if choice in choices:
                found.update(self._together.get(storage, ()))
        return found

    @cached_property
    def gone(self) -> frozenset[str]:
        """Results of forward nodes, of those with one that no backward node reads."""
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
        if self._saved is None:
            return frozenset(tensor.name for tensor in saved_tensors(self.graph))
        return frozenset(self._saved)

    @cached_property
    def makers(self) -> Mapping[str, Node]:
        """Tensor -> what makes it again, of tensors that something may make again."""
        found = {}
        for node in self.graph.nodes:
            if node.recomputable:
                again = node.once_more or node
                names = (name for name in node.outputs if node.remakes(name))
                found.update(dict.fromkeys(names, again))
        return found

    @cached_property
    def readers(self) -> Mapping[Phase, Mapping[str, tuple[int, ...]]]:
        """Phase -> tensor -> positions of its nodes that read it."""
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
    def overwriting(self) -> Mapping[str, tuple[int, ...]]:
        """Storage -> positions of the nodes that overwrite it, ascending."""
        found: dict[str, tuple[int, ...]] = {}
        for position, names in self.graph.overwritten.items():
            for storage in names:
                found[storage] = (*found.get(storage, ()), position)
        return found

    @cached_property
    def changing(self) -> Mapping[str, tuple[int, tuple[str, ...]]]:
        """Tensor -> its producer's position, and what that reads that is overwritten.

        Only of producers that read storages that some node of the graph overwrites.
        """
        storages, found = self.graph.storages, {}
        changed = {s for names in self.graph.overwritten.values() for s in names}
        for position, node in enumerate(self.graph.nodes):
            read = (storages[t] for t in node.inputs if t not in node.mutates)
            if names := tuple(storage for storage in read if storage in changed):
                found.update(dict.fromkeys(node.outputs, (position, names)))
        return found

    @cached_property
    def _together(self) -> Mapping[str, tuple[str, ...]]:
        """Storage -> all results of the nodes that have results in it."""
        storages = self.graph.storages
        found: dict[str, tuple[str, ...]] = {}
        for node in self.graph.nodes:
            for storage in dict.fromkeys(storages[name] for name in node.outputs):
                found[storage] = found.get(storage, ()) + node.outputs
        return found


class _Rewriter:
    """One rewritten graph in the making."""

    def __init__(
        self, known: Rematerializer, residency: Mapping[str, Residency]
    ) -> None:
        graph = known.graph
        self._tensors: dict[str, TensorSpec] = dict(graph.tensors)
        self._storages: dict[str, str] = dict(graph.storages)
        self._same_views = True
        self._nodes: list[Node] = []
        self._graph = graph
        self._residency = residency
        self._facts = known
        self._copies: dict[str, str] = {}
        self._count = 0
        self._dropped = known.dropped(residency)
        always = known.results(residency, (Residency.RECOMPUTE_ALWAYS,))
        self._always = {name for name in always if of_whole(name) != name}
        self._read: set[str] = set()  # of those and what is gone, by the forward pass
        self._phase, self._now = Phase.FORWARD, 0

    def reading(self) -> list[int]:
        """Positions of the nodes that may need something again, ascending."""
        phases = [Phase.FORWARD] if self._always else []
        found: set[int] = set()
        for phase in (*phases, Phase.BACKWARD):
            readers = self._facts.readers[phase]
            found.update(*(readers.get(name, ()) for name in self._dropped))
        return sorted(found)

    def pass_over(self, nodes: Iterable[Node]) -> None:
        """Append nodes that need nothing again."""
        self._nodes += nodes

    def found(self) -> Graph:
        """The graph, when all its nodes were visited."""
        storages = self._storages if self._same_views else None
        tensors = MappingProxyType(self._tensors)
        return self._graph.with_more_nodes(tensors, tuple(self._nodes), storages)

    def visit(self, node: Node, now: int) -> None:
        """Append a node that reads what is dropped; before it, what it needs again."""
        self._phase, self._now, read = node.phase, now, node.inputs
        if node.phase is Phase.BACKWARD:
            node = self._reading(node, self._dropped)
        else:
            if not self._always.isdisjoint(read) and self._own_bytes(node):
                node = self._reading(node, self._always)
            self._read.update(self._dropped.intersection(read))
        self._nodes.append(node)

    def _own_bytes(self, node: Node) -> bool:
        """Whether a node changes nothing, and its results share no bytes."""
        aliases = (self._tensors[output].alias for output in node.outputs)
        return not node.mutates and not any(aliases)

    def _reading(self, node: Node, dropped: Collection[str]) -> Node:
        """A node that reads copies of what is dropped, made before it."""
        mine: dict[str, str] = {}
        inputs = tuple(
            self._again(name, mine) if name in dropped else name for name in node.inputs
        )
        if inputs == node.inputs:
            return node
        for spec in (self._tensors[output] for output in node.outputs):
            alias = self._alias(node, spec, inputs)
            if alias != spec.alias:
                self._tensors[spec.name] = spec.sharing(alias)
                self._same_views = False
        return replace(node, inputs=inputs)

    def _again(self, name: str, mine: dict[str, str]) -> str:
        """The tensor itself, or a copy of it made now; `mine` are this node's own."""
        known = self._known(name, self._copies, mine)
        if known is None:
            return name
        dropped = self._dropped
        pending = [(name, known)]
        while pending:
            top, known = pending[-1]
            if top in known:
                pending.pop()
                continue
            node = self._facts.makers[top]
            inputs = [
                (t, self._known(t, known, mine) if t in dropped else None)
                for t in node.inputs
            ]
            missing = [(t, k) for t, k in inputs if k is not None and t not in k]
            if missing:
                pending += reversed(missing)
            else:
                found = tuple(t if k is None else k[t] for t, k in inputs)
                self._copy(node, found, known)
        return known[name]

    def _known(
        self, name: str, asking: dict[str, str], mine: dict[str, str]
    ) -> dict[str, str] | None:
        """Where a copy of a tensor is noted; None if the original is still there.

        What no backward node of the graph reads is gone when the forward pass is over:
        it is made again for what is `asking`. Within the forward pass, the original is
        there until it has been read once.

        Args:
            name: Of one that is dropped.
            asking: Where copies of what is made from it are noted.
            mine: Where those that no other node reads are.
        """
        if name in self._copies:
            return self._copies
        if name not in self._facts.makers or self._too_late(name):
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
        return asking if forward and storage not in self._facts.saved else None

    def _too_late(self, name: str) -> bool:
        """Whether what makes a tensor again would not find what it read before.

        What follows from a weight that has been updated meanwhile does not.
        """
        if name not in self._facts.changing:
            return False
        first, storages = self._facts.changing[name]
        return any(
            first <= position < self._now
            for storage in storages
            for position in self._facts.overwriting[storage]
        )

    def _copy(self, node: Node, inputs: tuple[str, ...], known: dict[str, str]) -> None:
        self._count += 1
        suffix = f"~{self._count}"
        outputs = tuple(output + suffix for output in node.outputs)
        tensors, storages = self._tensors, self._storages
        for output, name in zip(node.outputs, outputs, strict=True):
            spec = self._graph.tensors[output]
            alias = self._alias(node, spec, inputs)
            tensors[name] = spec.again(name, alias)
            storages[name] = name if alias is None else storages[alias]
            known[output] = name
        attrs = node.attrs
        if node.traits.replay:
            attrs = MappingProxyType({**attrs, **dict(node.traits.replay)})
        self._nodes.append(
            Node(
                node.name + suffix,
                node.op,
                inputs,
                outputs,
                attrs,
                self._phase,
                traits=node.traits,
            )
        )

    def _alias(
        self, node: Node, spec: TensorSpec, inputs: tuple[str, ...]
    ) -> str | None:
        """What a result has the bytes of if its node reads these inputs.

        A view of a copy shares the copy's bytes, not the original's.
        """
        alias = spec.alias
        if alias is None:
            return None
        now = dict(zip(node.inputs, inputs, strict=True))
        if alias in now:
            return now[alias]
        storages = self._graph.storages
        same = (now[t] for t in node.inputs if storages[t] == storages[alias])
        return next(same, alias)
