"""Rewrite a training step of one device as the step of one of many.

A collective is a node with an output buffer. It takes time on the network, beside
computation (`Profile.network_ms`); the first node that reads its result waits for it.
What FSDP2 does is written out node by node:

    gather    shards of a unit -> one buffer
    unshard   that buffer -> whole parameters, just before their first use
    reduce    gradients of a unit -> their shards, with a copy of them as scratch memory
    hold      keeps the gradients until the reduction is over

When the step is scheduled, gathers move a unit ahead (prefetch), and `hold` a unit
later, as far as the budget permits: `passes/scheduling/collectives.py`.

The parameters of a unit are gathered again for the backward pass, unless they are kept:
then its first gathering serves both passes. Optimizers update shards: the update's
tensors and times are divided by the number of ranks.

With DistributedDataParallel nothing is sharded. Gradients are summed in buckets, in the
order in which they are made, and the buckets' memory is there all the time.
"""

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import OPAQUE, Collective

_SMALL = 4096
"""Bytes up to which a tensor is not sharded, such as a step count."""

_BUCKET = 25 << 20
"""Bytes of a bucket of gradients of DistributedDataParallel."""

_AGAIN = "@backward"
"""Ending of names of parameters that are gathered again, and of their views."""


@dataclass(frozen=True)
class DataParallel:
    """Equal ranks that train one model, and the costs of what they exchange.

    Attributes:
        ranks: Number of ranks, two or more.
        units: Parameters by the unit in which they are gathered; their storages' names.
        sharded: Whether parameters, gradients and state are sharded.
        kept: Numbers of the units whose parameters stay from the forward to the
            backward pass.
        gather_ms: Returns the time to gather, or to reduce and scatter, these bytes.
        copy_bytes_per_ms: Bytes that are read and written in a millisecond.
    """

    ranks: int
    units: Sequence[Sequence[str]]
    sharded: bool
    kept: Collection[int]
    gather_ms: Callable[[int], float]
    copy_bytes_per_ms: float


def data_parallel_step(
    graph: Graph, profile: Profile, parallel: DataParallel
) -> tuple[Graph, Profile]:
    """Return the step of one rank, and its costs.

    Args:
        graph: The step of one device, whose tensors are bytes: their shapes are sizes.
        profile: Its costs.
        parallel: The ranks.
    """
    writer = _Writer(graph, profile, parallel)
    if parallel.sharded:
        for number, names in enumerate(parallel.units):
            writer.gather_unit(number, names)
    return writer.result()


class _Writer:
    def __init__(self, graph: Graph, profile: Profile, parallel: DataParallel) -> None:
        self._graph = graph
        self._parallel = parallel
        # Optimizers of a distributed model run behind the whole backward pass.
        self._passes = [n for n in graph.nodes if n.phase is not Phase.UPDATE]
        self._updates = [n for n in graph.nodes if n.phase is Phase.UPDATE]
        self._positions: dict[Phase, dict[str, int]] = {p: {} for p in Phase}
        for position, node in enumerate(self._passes):
            for name in node.inputs:
                self._positions[node.phase].setdefault(graph.storages[name], position)
        self._tensors = dict(graph.tensors)
        self._profile = profile
        self._node_ms = dict(profile.node_ms)
        self._workspaces = dict(profile.workspaces)
        self._network: dict[str, float] = {}
        self._shards: dict[str, str] = {}  # storage -> its shard
        self._again: dict[str, str] = {}  # in the backward pass: name -> other name
        self._forward: list[tuple[int, int, int]] = []  # first use, unit, bytes
        self._backward: list[tuple[int, int, int]] = []

    def gather_unit(self, number: int, names: Sequence[str]) -> None:
        """Shard the parameters of a unit, and note where they are gathered."""
        tensors = self._tensors
        nbytes = sum(tensors[name].nbytes for name in names)
        uses = [
            [first[name] for name in names if name in first]
            for first in (
                self._positions[Phase.FORWARD],
                self._positions[Phase.BACKWARD],
            )
        ]
        for name in names:
            self._shard(name)
            tensors[name] = replace(tensors[name], role=Role.ACTIVATION)
        if uses[0]:
            self._forward.append((min(uses[0]), number, nbytes))
        # The backward pass still has kept parameters that the forward pass read.
        if uses[1] and (number not in self._parallel.kept or not uses[0]):
            self._backward.append((min(uses[1]), number, nbytes))
            for name in names:
                again = self._again[name] = f"{name}{_AGAIN}"
                tensors[again] = tensors[name].again(again, None)

    def result(self) -> tuple[Graph, Profile]:
        """Return the rewritten graph, and its costs."""
        before: dict[int, list[Node]] = {}
        after: dict[int, list[Node]] = {}
        self._place_gathers(before, self._forward, "")
        self._place_gathers(before, self._backward, _AGAIN)
        self._place_reductions(after)
        nodes: list[Node] = []
        views: dict[str, Node] = {}  # of parameters, by result, as the forward made it
        # Parameters are gathered again in the backward pass, with their views.
        for position, node in enumerate(self._passes):
            nodes += before.get(position, ())
            if node.phase is Phase.BACKWARD:
                for name in node.inputs:
                    nodes += self._views_again(name, views)
                node = self._renamed(node, self._again)
            elif node.traits.view:
                views.update(dict.fromkeys(node.outputs, node))
            nodes.append(node)
            nodes += after.get(position, ())
        nodes += map(self._update, self._updates)
        made = {name for node in nodes for name in node.outputs}
        used = made.union(*(node.inputs for node in nodes), self._graph.inputs)
        # Drop what nothing makes: unused tensors, and sharded parameters as a whole.
        gone = {
            name
            for name in self._tensors.keys() - made
            if name in self._shards or name not in used
        }
        tensors = {n: spec for n, spec in self._tensors.items() if n not in gone}
        graph = Graph(tensors, tuple(nodes), self._graph.outputs)
        profile = replace(
            self._profile,
            node_ms=self._node_ms,
            workspaces=self._workspaces,
            network_ms=self._network,
        )
        return graph, profile

    def _place_gathers(
        self,
        before: dict[int, list[Node]],
        units: list[tuple[int, int, int]],
        ending: str,
    ) -> None:
        """Insert the nodes that gather units, each before its first use."""
        units.sort()
        for position, number, nbytes in units:
            names = self._parallel.units[number]
            buffer = f"gathered.{number}{ending}"
            self._declare(buffer, nbytes)
            gather = Node(
                f"gather.{number}{ending}",
                "all_gather",
                tuple(self._shards[name] for name in names),
                (buffer,),
                phase=self._passes[position].phase,
                traits=replace(OPAQUE, collective=Collective.GATHER),
            )
            self._time(gather, network_ms=self._parallel.gather_ms(nbytes))
            unshard = Node(
                f"unshard.{number}{ending}",
                "unshard",
                (buffer,),
                tuple(f"{name}{ending}" for name in names),
                phase=self._passes[position].phase,
                traits=OPAQUE,
            )
            self._time(unshard, 2 * nbytes / self._parallel.copy_bytes_per_ms)
            before.setdefault(position, []).extend((gather, unshard))

    def _place_reductions(self, after: dict[int, list[Node]]) -> None:
        """Insert the nodes that reduce gradients, each where the last one is made."""
        parallel, storages = self._parallel, self._graph.storages
        made = {t: i for i, node in enumerate(self._passes) for t in node.outputs}
        crossing = dict.fromkeys(
            name for node in self._updates for name in node.inputs if name in made
        )
        gradients: dict[str, str] = {}  # storage -> the gradient in it
        for name in sorted(crossing, key=made.__getitem__):
            if self._tensors[storages[name]].nbytes > _SMALL:
                gradients.setdefault(storages[name], name)
        groups = self._groups(gradients.values(), made)
        for number, group in enumerate(groups):
            whole = [storages[name] for name in group]
            nbytes = sum(self._tensors[name].nbytes for name in whole)
            once = parallel.gather_ms(nbytes)
            if parallel.sharded:
                results = tuple(self._shard(name, made=True) for name in whole)
                reduce = Node(
                    f"reduce.{number}", "reduce_scatter", tuple(group), results
                )
                self._workspaces[reduce.name] = nbytes  # copied to one buffer
                self._time(reduce, network_ms=once)
            else:
                results = (f"reduced.{number}",)
                self._declare(results[0], 0)
                self._declare(f"bucket.{number}", nbytes, Role.STATE)
                reduce = Node(
                    f"reduce.{number}",
                    "all_reduce",
                    (*group, f"bucket.{number}"),
                    results,
                )
                self._time(reduce, network_ms=2 * once)
            hold = Node(f"hold.{number}", "hold", (*group, *results), ())
            self._time(hold)
            end = max(made[name] for name in group)
            for node, collective in ((reduce, Collective.REDUCE), (hold, None)):
                traits = replace(OPAQUE, collective=collective)
                node = replace(node, phase=Phase.BACKWARD, traits=traits)
                after.setdefault(end, []).append(node)

    def _groups(self, names: Iterable[str], made: Mapping[str, int]) -> list[list[str]]:
        """Return gradients by unit, or by bucket, in the order in which they come."""
        groups: list[list[str]] = []
        if not self._parallel.sharded:
            room = 0
            for name in names:
                nbytes = self._tensors[self._graph.storages[name]].nbytes
                if nbytes > room or not groups:
                    groups.append([])
                    room = _BUCKET
                groups[-1].append(name)
                room -= nbytes
            return groups
        # A gradient belongs to the unit that was gathered last before it.
        begins = [position for position, _, _ in self._backward]
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(bisect.bisect(begins, made[name]), []).append(name)
        return [found[unit] for unit in sorted(found)]

    def _views_again(self, name: str, views: Mapping[str, Node]) -> list[Node]:
        """Return nodes that make a view of a parameter again, if there is none yet."""
        storage = self._graph.storages[name]
        if storage not in self._again or name in self._again or name not in views:
            return []
        node = views[name]
        found = [n for given in node.inputs for n in self._views_again(given, views)]
        for result in node.outputs:
            spec = self._tensors[result]
            alias = spec.alias or storage
            copy = self._again[result] = f"{result}{_AGAIN}"
            alias = self._again.get(alias, alias)
            self._tensors[copy] = replace(spec, name=copy, alias=alias)
        again = replace(
            node,
            name=f"{node.name}{_AGAIN}",
            inputs=tuple(self._again.get(given, given) for given in node.inputs),
            outputs=tuple(self._again[result] for result in node.outputs),
            phase=Phase.BACKWARD,
        )
        self._time(again, self._node_ms[node.name])
        return [*found, again]

    def _renamed(self, node: Node, names: Mapping[str, str]) -> Node:
        """Return a node that reads other tensors; views made of them follow."""
        if names.keys().isdisjoint(node.inputs):
            return node
        for result in node.outputs:
            spec = self._tensors[result]
            if spec.alias is not None and spec.alias in names:
                self._tensors[result] = replace(spec, alias=names[spec.alias])
        return replace(
            node,
            inputs=tuple(names.get(name, name) for name in node.inputs),
            mutates=tuple(names.get(name, name) for name in node.mutates),
        )

    def _update(self, node: Node) -> Node:
        """Return a node of the update, of shards if there are any."""
        ranks, storages = self._parallel.ranks, self._graph.storages
        if not self._parallel.sharded:
            return node
        # Optimizer state and results of the update are divided as well, unless small.
        for name in (*node.inputs, *node.outputs):
            spec = self._tensors[name]
            own = spec.role in PERSISTENT or name in node.outputs
            whole = spec is self._graph.tensors[name] and spec.nbytes > _SMALL
            if own and whole and name not in self._shards:
                shape = (math.ceil(spec.nbytes / ranks),)  # bytes of a rank's shard
                self._tensors[name] = replace(spec, shape=shape)
        shards = {
            name: self._shards[storages[name]]
            for name in node.inputs
            if storages[name] in self._shards
        }
        for result in node.outputs:
            alias = self._tensors[result].alias
            if alias is not None and storages[alias] in self._shards:
                shards.setdefault(alias, self._shards[storages[alias]])
        # A rank updates its shard only, in a part of the time and of the workspace.
        if not node.traits.view:
            self._node_ms[node.name] /= ranks
            if node.name in self._workspaces:
                self._workspaces[node.name] //= ranks
        node = self._renamed(node, shards)
        return replace(node, inputs=tuple(dict.fromkeys(node.inputs)))

    def _shard(self, storage: str, *, made: bool = False) -> str:
        """Declare the shard of a storage: an input, or the result of a reduction."""
        name = f"{storage}.shard"
        spec = self._tensors[storage]
        role = Role.ACTIVATION if made else spec.role
        self._declare(name, math.ceil(spec.nbytes / self._parallel.ranks), role)
        self._shards[storage] = name
        return name

    def _declare(self, name: str, nbytes: int, role: Role = Role.ACTIVATION) -> None:
        self._tensors[name] = TensorSpec(name, (nbytes,), "uint8", role)

    def _time(self, node: Node, ms: float = 0.0, network_ms: float = 0.0) -> None:
        self._node_ms[node.name] = ms
        if network_ms:
            self._network[node.name] = network_ms
