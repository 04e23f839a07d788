"""Final local search on a plan: neighbouring tensors and exchanges.

A plan that no change of a single tensor or a whole group improves is often improved by
keeping three consecutive tensors, as the chain between them is then neither recomputed
nor copied. If there is no room for that, a kept tensor may be exchanged for another
that is worth more.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from mucudnn.passes.planning.search.trials import SearchState
from mucudnn.passes.residency import EVERYTHING, Residency
from mucudnn.passes.residency.candidates import Candidate, Change

_IN_A_ROW = 3
_STAYS = (Residency.KEEP, Residency.PAGE)
"""Residencies of consecutive tensors: kept, or offloaded between any two uses."""


def neighbour_search(candidates: Sequence[Candidate], tried: SearchState) -> bool:
    """Improve a plan as far as its trials allow; return whether anything helped."""
    before = tried.step_ms
    better = True
    while better and not tried.exhausted():
        better = False
        for change in _consecutive(candidates):
            better |= tried.consider({**tried.residency, **dict(change)})
        for one, other in _exchanges(candidates, tried.residency):
            now = _choices(candidates, tried.residency)
            exchanged = {one: now[other], other: now[one]}
            if Residency.KEEP in exchanged.values():  # neither was exchanged yet
                better |= tried.consider({**tried.residency, **exchanged})
    return tried.step_ms < before


def _consecutive(candidates: Sequence[Candidate]) -> Iterator[Change]:
    """Yield consecutive tensors, all of them kept or paged."""
    names = [candidate.saved.name for candidate in candidates]
    for choice in _STAYS:
        for at in range(len(names) - _IN_A_ROW + 1):
            yield [(name, choice) for name in names[at : at + _IN_A_ROW]]


def _exchanges(
    candidates: Sequence[Candidate], residency: Mapping[str, Residency]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of a kept tensor and another one, those of similar size first."""
    choices = _choices(candidates, residency)
    stay = [c for c in candidates if choices[c.saved.name] is Residency.KEEP]
    others = [c for c in candidates if choices[c.saved.name] is not Residency.KEEP]
    pairs = sorted(itertools.product(stay, others), key=_size_ratio)
    return ((one.saved.name, other.saved.name) for one, other in pairs)


def _size_ratio(pair: tuple[Candidate, Candidate]) -> tuple[float, int]:
    """Return the ratio of two tensors' sizes, and minus the larger size."""
    one, other = (c.saved for c in pair)
    more, less = max(one.nbytes, other.nbytes), min(one.nbytes, other.nbytes)
    return more / max(1, less), -more


def _choices(
    candidates: Sequence[Candidate], residency: Mapping[str, Residency]
) -> dict[str, Residency]:
    others = residency.get(EVERYTHING, Residency.KEEP)
    return {c.saved.name: residency.get(c.saved.name, others) for c in candidates}
