"""How much memory an order of nodes takes, step by step.

Nodes are numbers: their positions in the graph as built. What a node allocates is
the same in every valid order (the first to touch a storage is the one that writes it);
what is free after it depends on who is still to come.
"""

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.graph import Graph
from mucudnn.passes.graph.dependencies import dependencies
from mucudnn.passes.liveness import live_ranges

__all__ = ["Footprint"]

_CHOICES = 64


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an order's use of memory depends on.

    Attributes:
        before: Node -> those it waits for.
        after: Node -> those that wait for it.
        allocated: Node -> bytes that begin to be in use with it.
        workspace: Node -> bytes in use only while it runs.
        touched: Node -> storages it uses that can be freed at some time.
        users: Storage -> the nodes that use it, ascending.
        sizes: Storage -> bytes.
        owner: Storage -> the node that allocates it; -1 if it is there at the start.
        start: Bytes in use before the first node.
    """

    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    allocated: tuple[int, ...]
    workspace: tuple[int, ...]
    touched: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    owner: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, graph: Graph, workspaces: Mapping[str, int] | None) -> "Footprint":
        """The footprint of a graph."""
        end = len(graph.nodes)
        before = dependencies(graph)
        after: list[list[int]] = [[] for _ in before]
        for node, earlier in enumerate(before):
            for p in earlier:
                after[p].append(node)
        present = {graph.storages[name] for name in graph.inputs}
        numbers: dict[str, int] = {}
        owner = []
        allocated = [0] * end
        start = 0
        for name, live in live_ranges(graph).items():
            nbytes = graph.tensors[name].nbytes
            if name in present:
                start += nbytes
            else:
                allocated[live.first] += nbytes
            if live.last < end:
                numbers[name] = len(numbers)
                owner.append(-1 if name in present else live.first)
        touched = [
            tuple(
                numbers[s]
                for s in dict.fromkeys(graph.storages[t] for t in node.tensors)
                if s in numbers
            )
            for node in graph.nodes
        ]
        users: list[list[int]] = [[] for _ in numbers]
        for node, storages in enumerate(touched):
            for s in storages:
                users[s].append(node)
        return cls(
            before=before,
            after=tuple(map(tuple, after)),
            allocated=tuple(allocated),
            workspace=tuple((workspaces or {}).get(n.name, 0) for n in graph.nodes),
            touched=tuple(touched),
            users=tuple(map(tuple, users)),
            sizes=tuple(graph.tensors[name].nbytes for name in numbers),
            owner=tuple(owner),
            start=start,
        )

    def curve(self, order: Sequence[int]) -> list[int]:
        """Bytes in use while each node of a complete order runs."""
        left = [len(nodes) for nodes in self.users]
        used, result = self.start, []
        for node in order:
            used += self.allocated[node]
            result.append(used + self.workspace[node])
            for s in self.touched[node]:
                left[s] -= 1
                if not left[s]:
                    used -= self.sizes[s]
        return result

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes in use at once."""
        return max(self.curve(order), default=self.start)

    def greedy(self, nodes: Iterable[int]) -> list[int]:
        """An order of some nodes that takes the cheapest next, all others being given.

        Of the nodes that are ready, the one that leaves the least memory in use among
        those that need no new maximum; if all do, the one that needs the lowest. At
        most 64 are looked at, those that were built first.
        """
        inside = set(nodes)
        waits = {n: sum(p in inside for p in self.before[n]) for n in inside}
        left = [0] * len(self.users)
        for s, users in enumerate(self.users):
            left[s] = sum(n in inside for n in users) if users[-1] in inside else -1
        ready = sorted(n for n in inside if not waits[n])
        used = peak = 0
        order = []

        def cost(node: int) -> tuple[int, int, int]:
            need = used + self.allocated[node] + self.workspace[node]
            freed = sum(self.sizes[s] for s in self.touched[node] if left[s] == 1)
            return max(need, peak), self.allocated[node] - freed, node

        while ready:
            high, change, node = min(map(cost, itertools.islice(ready, _CHOICES)))
            order.append(node)
            ready.remove(node)
            used, peak = used + change, high
            for s in self.touched[node]:
                left[s] -= 1
            for follower in self.after[node]:
                if follower in waits:
                    waits[follower] -= 1
                    if not waits[follower]:
                        bisect.insort(ready, follower)
        return order
