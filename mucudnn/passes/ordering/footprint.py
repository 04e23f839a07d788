"""Memory curve of an order of nodes.

Nodes are numbered by their positions in the graph as built. The bytes a node allocates
are the same in every valid order, as the first node to touch a storage is the one that
writes it; the bytes it frees depend on which users are still to come.
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
    """Dependencies and sizes that determine the memory curve of any order.

    Attributes:
        before: Dependencies of each node.
        after: Dependents of each node.
        allocated: Bytes that each node allocates.
        workspace: Scratch bytes of each node.
        touched: Storages each node uses that are freed within the step.
        users: Nodes that use each storage, ascending.
        sizes: Bytes of each storage.
        owner: Node that allocates each storage; -1 if allocated at the start.
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
        """Return the footprint of a graph."""
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
        """Return the bytes in use at each node of a complete order."""
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
        """Return the peak of a complete order in bytes."""
        return max(self.curve(order), default=self.start)

    def greedy(self, nodes: Iterable[int]) -> list[int]:
        """Order some nodes greedily.

        Among the ready nodes that do not raise the peak, the one that leaves the least
        memory in use runs next; if all raise it, the one that raises it least. Only the
        first 64 ready nodes are considered.
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
