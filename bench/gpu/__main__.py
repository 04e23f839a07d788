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

from bench.gpu.facts import facts
from bench.gpu.job import CACHE, Job, Report
from bench.gpu.store import read_json, write_json
from bench.table import render
from mucudnn.errors import MucudnnError

__all__ = ["SECONDS", "main"]

SECONDS: Mapping[str, int] = MappingProxyType(
    {"probe": 45, "deepbench": 290, "peers": 90, "tests": 70, "models": 35}
)
"""Parts in the order that is most worth having, and the seconds each may take."""

MOST_S = 540
"""What one call of the script may take in all."""

_MODULES = {"tests": "gpu_tests"}
_SUMMARY = "summary.json"
_COMPLETE, _PARTIAL, _FAILED, _BEGUN = "complete", "partial", "failed", "begun"
_INTERRUPTED = 130
_STATUS = {_COMPLETE: 0, _PARTIAL: 3, _FAILED: 1, _BEGUN: 1}


def main() -> int:
    """0: complete; 3: there is more to do; 1: something failed; 2: not understood."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have them ignored
        signal.signal(number, signal.default_int_handler)
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
    module = importlib.import_module(
        f"bench.gpu.{_MODULES.get(options.part, options.part)}"
    )
    if options.again:
        _remove(out, module.FILES)
        if options.part == "deepbench":
            _remove(out, [f"{CACHE}*"])
    return _run(options, module, settings)


def _run(options: argparse.Namespace, module: Any, settings: Mapping[str, Any]) -> int:
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
    )
    try:
        report = module.run(job)
    except KeyboardInterrupt:  # by `timeout`, by the script or at the keyboard
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
    files = {f.name for pattern in module.FILES for f in out.glob(pattern)}
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
    print(f"== {options.part}: {state}\n{report.text}", flush=True)
    for failure in report.failures:
        print(f"FAILED {failure}", flush=True)
    return _STATUS[state]


def _budget(options: argparse.Namespace) -> int:
    """Print `part seconds` lines for the script; refuse what takes too long."""
    seconds = dict(SECONDS)
    for setting in options.set:
        part, _, value = setting.partition("=")
        if part not in SECONDS or not value.isdigit():
            print(f"--seconds {setting}: expected PART=SECONDS", file=sys.stderr)
            return 2
        seconds[part] = int(value)
    wanted = options.parts or list(SECONDS)
    unknown = [part for part in wanted if part not in SECONDS]
    if unknown:
        print(
            f"unknown part {unknown[0]!r}; choose of: {', '.join(SECONDS)}",
            file=sys.stderr,
        )
        return 2
    total = sum(seconds[part] for part in wanted)
    if total > MOST_S:
        print(
            f"{' '.join(wanted)} would take {total} s, at most {MOST_S} are allowed: "
            "name fewer parts or give --seconds",
            file=sys.stderr,
        )
        return 2
    for part in SECONDS:
        if part in wanted:
            print(part, seconds[part])
    return 0


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
    parser.add_argument("--again", action="store_true", help="repeat what is complete")
    return parser


if __name__ == "__main__":
    sys.exit(main())
