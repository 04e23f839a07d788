"""Starts of a search under a tight budget: tensors leave memory one after another.

Everything is kept at first. At the node that needs the most bytes, tensors that it does
not use are offloaded or recomputed, those first that cost the least time per byte. Then
the rewritten step has another critical node, and so on, until the step fits.

The price of a copy is a share of its time, as copies mostly run beside computation.
With a low share nearly everything is copied, which takes long, but gives a search the
most to improve; with a high one, nearly everything is recomputed. Which share and how
much free memory lead to the fastest plan differs by network, so several are tried.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from mucudnn.ir.graph import Phase
from mucudnn.passes.liveness import Use
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import Residency

MOST_NODES = 1500
"""Nodes of a step up to which evictions are tried: in larger ones they take long."""

_COPY_SHARES = (0.05, 0.07, 0.1)
"""Prices of copies, as shares of their time."""

_TARGETS = (0.85, 0.75, 0.65)
"""Shares of the budget that are to be used at most. The rest is for prefetched tensors
and workspaces."""

_AT_ONCE = 0.1
"""Share of the missing bytes that is evicted before the step is rewritten again."""

_SMALL = 1e-4
"""Size below which gradients and other tensors stay, as a share of the peak."""

_SLOW = 1.3
"""Factor on the time of computation above which evictions end."""

_ROOM = 1.01
"""Factor on the least bytes below which a budget is not larger than these."""

_PAGE_PRICE = 1.5
"""Price of copies over all gaps, compared with that of one."""

_NEXT = {
    Residency.KEEP: (Residency.OFFLOAD, Residency.PAGE, Residency.RECOMPUTE),
    Residency.OFFLOAD: (Residency.PAGE, Residency.RECOMPUTE),
    Residency.RECOMPUTE: (Residency.PAGE,),
}
"""Residencies by which a tensor leaves a node, by the one that it has."""

_NEXT_OF_COPY = (Residency.RECOMPUTE_EACH, Residency.OFFLOAD, Residency.PAGE)
"""The same for the result of a recomputed node."""

Residencies = Mapping[str, Residency]


def evicted_family(
    request: StepRequest, below_ms: float, least_bytes: int
) -> list[Residencies]:
    """Return residencies that fit, by several prices of copies; see `evicted`."""
    return [
        found
        for copy_share in _COPY_SHARES
        for found in evicted(request, below_ms, least_bytes, copy_share)
    ]


def evicted(
    request: StepRequest, below_ms: float, least_bytes: int, copy_share: float
) -> Iterator[Residencies]:
    """Yield residencies that fit ever smaller parts of the budget.

    Args:
        request: The planning request.
        below_ms: Time that computation may not take.
        least_bytes: Bytes that other residencies need at least. Where the budget is not
            larger, evictions hardly ever fit, and are not tried.
        copy_share: Price of a copy, as a share of its time.
    """
    kept_ms = request.compute_ms({})
    if request.budget < _ROOM * least_bytes or below_ms <= kept_ms:
        return
    eviction = _Eviction(request, copy_share, min(below_ms, _SLOW * kept_ms))
    for share in _TARGETS:
        while (missing := eviction.peak - share * request.budget) > 0:
            if not eviction.evict(missing):
                return
        yield dict(eviction.residency)


class _Eviction:
    """Residencies of a step from which ever more tensors are evicted.

    Attributes:
        residency: The residencies so far.
        peak: Least bytes that the step needs with them.
    """

    def __init__(
        self, request: StepRequest, copy_share: float, below_ms: float
    ) -> None:
        self._request, self._below_ms = request, below_ms
        graph = request.graph
        self._price = copy_share * request.profile.round_trip_ms
        self._recompute_ms = {c.saved.name: c.recompute_ms for c in request.candidates}
        forward = [node.phase is Phase.FORWARD for node in graph.nodes]
        self._readers = {
            name: max(1, sum(not forward[i] for i in graph.reads.get(name, ())))
            for name in self._recompute_ms
        }
        self.residency = dict.fromkeys(self._recompute_ms, Residency.KEEP)
        self._left: set[tuple[str, Residency]] = set()
        self._rewrite()

    def _rewrite(self) -> None:
        self._ready = ready = self._request.rewritten(self.residency)
        needed = ready.problem(ready.first_plans("least"), math.inf).needed()
        self.peak = max(needed)
        self._node = needed.index(self.peak)

    def evict(self, missing: float) -> bool:
        """Evict a part of the missing bytes at the peak.

        A tensor never gets a residency again that it had before.

        Returns:
            False if nothing can leave, or computation takes too long then.
        """
        options = sorted(self._options(), key=lambda o: o[0])
        enough, changed = _AT_ONCE * missing, set()
        for _, name, choice, nbytes in options:
            if name in changed:
                continue
            self._left.add((name, self.residency.get(name, Residency.KEEP)))
            self.residency[name] = choice
            changed.add(name)
            enough -= nbytes
            if enough <= 0:
                break
        if not changed or self._request.compute_ms(self.residency) >= self._below_ms:
            return False
        self._rewrite()
        return True

    def _options(self) -> Iterator[tuple[float, str, Residency, int]]:
        """Yield time per byte, name, residency and bytes of what may leave the peak."""
        ready = self._ready
        count = len(ready.graph.nodes)
        of_storage = {
            storage: name
            for name, storage in ready.graph.storages.items()
            if name.partition("~")[0] in self._recompute_ms
        }
        for storage, use in ready.uses.items():
            gaps = ready.swaps.get(storage, ())
            if not use.nbytes or not _idle(use, gaps, self._node, count):
                continue
            name, nbytes = of_storage.get(storage), use.nbytes
            if name is not None:
                tensor, _, copy = name.partition("~")
                now = self.residency[tensor]
                before = self._price_of(tensor, nbytes, now)
                for choice in _NEXT_OF_COPY if copy else _NEXT.get(now, ()):
                    price = self._price_of(tensor, nbytes, choice)
                    if (tensor, choice) in self._left or choice is now:
                        continue
                    if price < math.inf:
                        yield (price - before) / nbytes, tensor, choice, nbytes
            elif "~" not in storage and nbytes >= _SMALL * self.peak:
                paged = self.residency.get(storage) is Residency.PAGE
                if not paged and storage not in self._request.graph.immovable:
                    copies = 2 if use.persistent else 1
                    yield copies * self._price, storage, Residency.PAGE, nbytes

    def _price_of(self, name: str, nbytes: int, choice: Residency) -> float:
        """Return the time that a residency of a tensor takes, compared with keeping."""
        if choice is Residency.KEEP:
            return 0.0
        if choice is Residency.RECOMPUTE:
            return self._recompute_ms[name]
        if choice is Residency.RECOMPUTE_EACH:
            return self._recompute_ms[name] * self._readers[name]
        gaps = _PAGE_PRICE if choice is Residency.PAGE else 1.0
        return gaps * self._price * nbytes


def _idle(use: Use, gaps: Sequence[tuple[int, int]], position: int, count: int) -> bool:
    """Return whether a storage is resident at a node that does not use it."""
    at = use.positions
    if position in at or not at:
        return False
    if not use.persistent and not at[0] < position < at[-1]:
        return False
    return not any(i < position < j or i < position + count < j for i, j in gaps)
