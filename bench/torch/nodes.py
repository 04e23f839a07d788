"""One table of node times: whatever runs a node, it costs what it cost alone."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.ir.graph import Phase
from mucudnn.ir.profile import Profile
from mucudnn.torch.costs.measure import call_key, measured
from mucudnn.torch.lowering.lower import lower
from mucudnn.torch.lowering.lowered import Layout, Lowered


class NodeTable:
    """Times by operation, operands and constants; each is measured once."""

    def __init__(self) -> None:
        self._ms: dict[Any, float] = {}
        self._profiles: dict[frozenset[str], Profile] = {}

    def __call__(self, lowered: Lowered) -> Profile:
        """A graph's costs; its scratch memory is measured with its times."""
        names = frozenset(f"{n.name} {n.op}" for n in lowered.graph.nodes)
        if names not in self._profiles:
            self._profiles[names] = measured(lowered)
        profile = self._profiles[names]
        times = {
            node.name: self._ms.setdefault(
                call_key(lowered, node), profile.node_ms[node.name]
            )
            for node in lowered.graph.nodes
        }
        return replace(profile, node_ms=times)

    def total_ms(self, module: torch.fx.GraphModule) -> float:
        """All nodes of one of PyTorch's graphs, once each."""
        with torch.no_grad():
            lowered = lower(module, lambda name: Phase.FORWARD)
            return sum(self(lowered).node_ms.values())


class EagerTimes:
    """What eager calls come to, every operation at the median of its times."""

    def __init__(self) -> None:
        self._seen: dict[Any, list[float]] = defaultdict(list)
        self._calls: dict[str, list[Any]] = {}

    def watch(self, name: str, call: Callable[[], object], times: int = 3) -> None:
        """Run a call a few times with each of its operations timed."""
        for _ in range(times):
            with _Watch(self._seen) as watch:
                call()
            self._calls[name] = watch.calls

    def total_ms(self, name: str) -> float:
        """The operations of a call that was watched."""
        medians: Mapping[Any, float] = {
            key: statistics.median(times) for key, times in self._seen.items()
        }
        return sum(medians[key] for key in self._calls[name])


class _Watch(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    def __init__(self, seen: dict[Any, list[float]]) -> None:
        super().__init__()
        self._seen = seen
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        key = func, repr(pytree.tree_map_only(torch.Tensor, Layout.of, given))
        start = perf_counter()
        found = func(*given[0], **given[1])
        self._seen[key].append(1e3 * (perf_counter() - start))
        self.calls.append(key)
        return found
