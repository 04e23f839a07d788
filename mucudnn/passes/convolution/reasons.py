"""Why algorithms were left out, in few words however many there are.

A library may have dozens of algorithms for one convolution, and most may be left out
for the same reason. Reasons are counted, not repeated.
"""

from collections.abc import Iterable

from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.status import RowStatus

__all__ = ["algorithms", "counted", "left_out", "refused"]

_MOST = 6
"""More reasons than that are not read."""
_MOST_TEXT = 100


def refused(perf: AlgoPerf) -> bool:
    """Whether the numerics that were asked for kept it out, rather than a failure."""
    return perf.status is RowStatus.REFUSED


def counted(failures: Iterable[tuple[str, str]]) -> str:
    """`it rounds float32 to TF32 (9), it is not deterministic (3)`.

    Args:
        failures: (algorithm, reason), in any order; an algorithm counts once a reason.
    """
    algos: dict[str, set[str]] = {}
    for algo, reason in failures:
        algos.setdefault(_shortened(RowStatus.REFUSED.reason(reason)), set()).add(algo)
    often = sorted(algos.items(), key=lambda item: -len(item[1]))
    shown = [f"{reason} ({len(names)})" for reason, names in often[:_MOST]]
    if len(often) > _MOST:
        shown.append(f"{len(often) - _MOST} more reasons")
    return ", ".join(shown)


def left_out(perfs: Iterable[AlgoPerf]) -> tuple[tuple[str, str], ...]:
    """(who, why) of all failed rows: few algorithms each by its name, many in a count.

    Algorithms that were refused are always one entry.
    """
    rows = [(perf, perf.error) for perf in perfs if perf.error is not None]
    kept_out = [(perf.algo, error) for perf, error in rows if refused(perf)]
    failed = {(perf.algo, error): None for perf, error in rows if not refused(perf)}
    entries: list[tuple[str, str]] = []
    if kept_out:
        entries.append(
            (algorithms(kept_out), RowStatus.REFUSED.text(counted(kept_out)))
        )
    if len(failed) > _MOST:
        entries.append((algorithms(failed), counted(failed)))
    else:
        entries.extend(failed)
    return tuple(entries)


def algorithms(failures: Iterable[tuple[str, str]]) -> str:
    """`12 algorithms`: how many different ones."""
    number = len({algo for algo, _ in failures})
    return f"{number} algorithm{'' if number == 1 else 's'}"


def _shortened(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"
