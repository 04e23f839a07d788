"""The last changes of a plan: tensors next to each other, and those that change places.

What no change of a single tensor or of a whole group improves is often improved by
keeping three tensors in a row: the chain between them then need not be computed
again, and nothing of it is copied. Where there is no room for that, a tensor that stays
may change places with another that is worth more.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from mucudnn.passes.planning.search.trials import Trials
from mucudnn.passes.residency import EVERYTHING, Residency
from mucudnn.passes.residency.candidates import Candidate, Change

__all__ = ["polish"]

_IN_A_ROW = 3
_STAYS = (Residency.KEEP, Residency.PAGE)
"""What becomes of tensors in a row: they stay, or leave between any two uses."""


def polish(candidates: Sequence[Candidate], tried: Trials) -> bool:
    """Improve a plan as far as its trials allow; whether anything helped.

    Args:
        candidates: Saved tensors, in order of production.
        tried: A plan, and trials that are left.
    """
    before = tried.step_ms
    better = True
    while better and not tried.exhausted():
        better = False
        for change in _rows(candidates):
            better |= tried.consider({**tried.residency, **dict(change)})
        for one, other in _places(candidates, tried.residency):
            now = _choices(candidates, tried.residency)
            exchanged = {one: now[other], other: now[one]}
            if Residency.KEEP in exchanged.values():  # neither has changed places yet
                better |= tried.consider({**tried.residency, **exchanged})
    return tried.step_ms < before


def _rows(candidates: Sequence[Candidate]) -> Iterator[Change]:
    """Tensors in a row, all of them kept or paged."""
    names = [candidate.saved.name for candidate in candidates]
    for choice in _STAYS:
        for at in range(len(names) - _IN_A_ROW + 1):
            yield [(name, choice) for name in names[at : at + _IN_A_ROW]]


def _places(
    candidates: Sequence[Candidate], residency: Mapping[str, Residency]
) -> Iterator[tuple[str, str]]:
    """A tensor that stays and one that does not, those of like size first."""
    choices = _choices(candidates, residency)
    stay = [c for c in candidates if choices[c.saved.name] is Residency.KEEP]
    others = [c for c in candidates if choices[c.saved.name] is not Residency.KEEP]
    pairs = sorted(itertools.product(stay, others), key=_unlike)
    return ((one.saved.name, other.saved.name) for one, other in pairs)


def _unlike(pair: tuple[Candidate, Candidate]) -> tuple[float, int]:
    """How different two tensors' sizes are, and how far they are from each other."""
    one, other = (c.saved for c in pair)
    more, less = max(one.nbytes, other.nbytes), min(one.nbytes, other.nbytes)
    return more / max(1, less), -more


def _choices(
    candidates: Sequence[Candidate], residency: Mapping[str, Residency]
) -> dict[str, Residency]:
    others = residency.get(EVERYTHING, Residency.KEEP)
    return {c.saved.name: residency.get(c.saved.name, others) for c in candidates}
