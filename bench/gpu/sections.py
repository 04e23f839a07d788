"""Questions that are asked one after another, each once, each answer written by itself.

What took the process with it is not asked again; what was cut off, by the time a part
has or by a signal, is asked once more.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.gpu.job import Job, read_json
from mucudnn.errors import MucudnnError

Ask = Callable[[], Mapping[str, Any]]

_TRIES = 2
_DONE, _FAILED, _BEGUN, _CUT_OFF = "done", "failed", "begun", "cut off"


class UnfinishedError(Exception):
    """Its time is up; what it has measured is kept, so that it may end another time."""


def asked(
    job: Job,
    file: str,
    asks: Mapping[str, Ask],
    *,
    worth_s: float,
    head: Mapping[str, Any] | None = None,
    works: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Answers by name, those of earlier runs among them.

    Args:
        job: Where, and until when.
        file: What they are written to.
        asks: The questions, in order.
        worth_s: With less time than this none is begun.
        head: What stands in the file beside them.
        works: Asked after each; whether another can be asked in this process.
    """
    sections: dict[str, Any] = read_json(job.out / file).get("sections", {})

    def note(name: str, entry: Mapping[str, Any]) -> None:
        sections[name] = entry
        job.write(file, {**(head or {}), "sections": sections})

    for name, entry in sections.items():
        if entry["state"] == _BEGUN:
            sections[name] = _failure("the process ended during it")
        elif entry["state"] == _CUT_OFF and entry["times"] >= _TRIES:
            sections[name] = _failure(f"it was cut off {entry['times']} times")
    for name, ask in asks.items():
        before = sections.get(name, {"state": _CUT_OFF, "times": 0})
        if before["state"] != _CUT_OFF:
            continue
        if job.left_s < worth_s:
            break
        note(name, {"state": _BEGUN})
        cut_off = {"state": _CUT_OFF, "times": before["times"] + 1}
        try:
            note(name, _answer(ask))
        except UnfinishedError:
            note(name, cut_off)
        except KeyboardInterrupt:
            note(name, cut_off)
            raise
        job.keep()
        if not works():
            break
    return sections


def all_answered(sections: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether each has an answer, or none to wait for."""
    states = (sections.get(name, {}).get("state") for name in names)
    return all(state in (_DONE, _FAILED) for state in states)


def _answer(ask: Ask) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        found = {"state": _DONE, **ask()}
    except UnfinishedError:
        raise
    except Exception as e:  # one must not cost the others
        if not isinstance(e, MucudnnError):
            traceback.print_exc()
        found = _failure(f"{type(e).__name__}: {e}")
    return {**found, "seconds": time.monotonic() - begun}


def _failure(why: str) -> dict[str, Any]:
    return {"state": _FAILED, "error": why}
