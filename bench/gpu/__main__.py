"""`python -m bench.gpu PART OUT`: one part within its time; `bench/gpu.sh` runs all."""

import argparse
import importlib
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.gpu.job import CACHE, Job, Keeper, Report, facts, read_json, write_json
from bench.table import render
from mucudnn.errors import MucudnnError

SECONDS: Mapping[str, int] = MappingProxyType(
    {
        "pytorch": 530,
        "torch": 140,
        "steps": 520,
        "deepbench": 500,
        "probe": 60,
        "tests": 300,
        "peers": 240,
        "models": 150,
    }
)
"""Parts in the order that is most worth having, and the seconds each may take.

Each by itself is less than `MOST_S`; those that are more together get a share each.
"""

MOST_S = 540
"""What the parts of one call of the script may take in all."""

_LEAST_S = 10
_KEPT_S = 40
"""Of its own seconds, what a part keeps where they are shared out, if that is there."""

_MODULES = {"tests": "gpu_tests", "torch": "torch_guest"}
_SUMMARY = "summary.json"
_COMPLETE, _PARTIAL, _FAILED, _BEGUN = "complete", "partial", "failed", "begun"
_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STATUS = {_COMPLETE: 0, _PARTIAL: 3, _FAILED: 1, _BEGUN: 1}


def main() -> int:
    """0: complete; 3: there is more to do; 1: something failed; 2: not understood."""
    for number in _SIGNALS:  # a shell may have them ignored
        signal.signal(number, _interrupted)
    options = _parser().parse_args()
    if options.part == "budget":
        return _budget(options)
    if options.part == "summary":
        return _summary(options)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(options, name) for name in ("backend", "batch", "layers")}
    known = _parts(out).get(options.part, {})
    if known and known["settings"] != settings and not options.again:
        print(
            f"{out} holds {options.part} of {known['settings']}, not {settings}: name "
            "another folder, or add --again",
            file=sys.stderr,
        )
        return 2
    if known.get("state") == _COMPLETE and not options.again:
        print(f"{options.part}: complete; --again repeats it", flush=True)
        return _STATUS[_COMPLETE]
    return _run(options, settings)


def _interrupted(number: int, frame: object) -> None:
    """End what runs, once: what is written down then is not interrupted again."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _module(options: argparse.Namespace) -> Any:
    module = importlib.import_module(
        f"bench.gpu.{_MODULES.get(options.part, options.part)}"
    )
    if options.again:
        _remove(options.out, module.FILES)
        if options.part == "deepbench":
            _remove(options.out, [f"{CACHE}*"])
    return module


def _run(options: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    begun = time.monotonic()
    out: Path = options.out
    seconds = options.seconds or SECONDS[options.part]
    _note(out, options.part, {"state": _BEGUN, "seconds": None, "settings": settings})
    job = Job(
        out=out,
        backend_name=options.backend,
        ends=begun + seconds,
        batch=options.batch,
        layers=options.layers,
        tests=options.tests,
        rehearsal=options.rehearse,
        hang_s=options.hang,
        keeper=Keeper(out, options.keep, options.keep_every),
    )
    module = None
    try:
        module = _module(options)
        report = module.run(job)
    except KeyboardInterrupt:  # by `timeout`, by the script or at the keyboard
        job.keep(now=True)
        print(f"== {options.part}: ended before it was done", flush=True)
        return _INTERRUPTED
    except MucudnnError as e:
        report = Report(complete=False, failures=(str(e),))
    except Exception as e:  # the other parts do not depend on this one
        traceback.print_exc()
        report = Report(complete=False, failures=(f"{type(e).__name__}: {e}",))
    state = _COMPLETE if report.complete else _PARTIAL
    if report.failures:
        state = _FAILED
    patterns = () if module is None else module.FILES
    files = {f.name for pattern in patterns for f in out.glob(pattern)}
    _note(
        out,
        options.part,
        {
            "state": state,
            "seconds": time.monotonic() - begun,
            "files": sorted(files),
            "failures": report.failures,
            "text": report.text,
            "settings": settings,
        },
    )
    job.keep(now=True)
    print(f"== {options.part}: {state}\n{report.text}", flush=True)
    for failure in report.failures:
        print(f"FAILED {failure}", flush=True)
    return _STATUS[state]


def _budget(options: argparse.Namespace) -> int:
    """Print `part seconds` lines for the script; refuse what takes too long."""
    given: dict[str, int] = {}
    for setting in options.set:
        part, _, value = setting.partition("=")
        if part not in SECONDS or not value.isdigit():
            print(f"--seconds {setting}: expected PART=SECONDS", file=sys.stderr)
            return 2
        given[part] = int(value)
    unknown = [part for part in options.parts if part not in SECONDS]
    if unknown:
        print(
            f"unknown part {unknown[0]!r}; choose of: {', '.join(SECONDS)}",
            file=sys.stderr,
        )
        return 2
    wanted = [part for part in SECONDS if part in (options.parts or SECONDS)]
    try:
        seconds = shares(wanted, given)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    for part in wanted:
        print(part, seconds[part])
    return 0


def shares(wanted: Sequence[str], given: Mapping[str, int]) -> dict[str, int]:
    """Seconds for each part: what is given, else its own or its share of what is left.

    Raises:
        ValueError: There is too little for all.
    """
    fixed = sum(given.get(part, 0) for part in wanted)
    free = [part for part in wanted if part not in given]
    left = MOST_S - fixed
    if left < _LEAST_S * len(free):
        raise ValueError(
            f"{' '.join(wanted)} would take {fixed + _LEAST_S * len(free)} s at least, "
            f"at most {MOST_S} are allowed: name fewer parts or give --seconds"
        )
    least = {part: min(_KEPT_S, SECONDS[part], left // len(free)) for part in free}
    beyond = sum(SECONDS[part] - least[part] for part in free)
    share = min(1.0, (left - sum(least.values())) / beyond) if beyond else 0.0
    for part, kept in least.items():
        least[part] = int(kept + (SECONDS[part] - kept) * share)
    return {part: given.get(part, least.get(part, 0)) for part in wanted}


def _summary(options: argparse.Namespace) -> int:
    """Every part that was asked for: how it ended, and what it left."""
    parts = _parts(options.out)
    rows, worst = [], 0
    for part in options.parts or SECONDS:
        entry = parts.get(part, {"state": _FAILED, "failures": ["it never began"]})
        state, failures = entry["state"], list(entry.get("failures", ()))
        if state == _BEGUN:
            failures = ["it was ended before it was done; run it again to go on"]
        files = " ".join(entry.get("files", ()))
        rows.append((part, state, entry.get("seconds"), len(failures), files))
        for failure in failures:
            print(f"{part}: {failure}")
        status = _STATUS[state]
        worst = 1 if 1 in (worst, status) else max(worst, status)
    print(render(("part", "state", "seconds", "failures", "files"), rows))
    return worst


def _parts(out: Path) -> dict[str, Any]:
    parts: dict[str, Any] = read_json(out / _SUMMARY).get("parts", {})
    return parts


def _note(out: Path, part: str, entry: Mapping[str, Any]) -> None:
    parts = {**_parts(out), part: entry}
    write_json(out / _SUMMARY, {"machine": facts(), "parts": parts})


def _remove(out: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for file in out.glob(pattern):
            file.unlink()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("part", choices=[*SECONDS, "budget", "summary"])
    parser.add_argument("out", type=Path, help="folder for results")
    parser.add_argument("parts", nargs="*", metavar="PART", help="for the other two")
    parser.add_argument("--seconds", type=float, help="that the part may take")
    parser.add_argument("--set", action="append", default=[], metavar="PART=SECONDS")
    parser.add_argument("--backend", default="cuda", help="null or cpu rehearse")
    parser.add_argument("--batch", type=int, help="mini-batch size, for rehearsals")
    parser.add_argument("--layers", type=int, help="at most so many of each suite")
    parser.add_argument("--tests", type=Path, default=Path("tests"))
    parser.add_argument("--rehearse", action="store_true", help="there is no GPU")
    parser.add_argument("--hang", type=float, default=60.0, help="s a test may take")
    parser.add_argument("--keep", type=Path, help="pack results into this folder")
    parser.add_argument("--keep-every", type=float, default=5.0, help="s at least")
    parser.add_argument("--again", action="store_true", help="repeat what is complete")
    return parser


if __name__ == "__main__":
    sys.exit(main())
