"""The tests that need the GPU, stopped in time."""

import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from bench.gpu.facts import facts
from bench.gpu.job import Job, Report
from bench.gpu.store import write_json

__all__ = ["FILES", "run"]

_RESULT, _LOG, _XML = "tests.json", "tests.log", "tests.xml"
FILES = (_RESULT, _LOG, _XML)

_MARKER = "gpu"
_STOPPING_S = 5.0
_NONE_COLLECTED = 5
_SHOWN = 20
_MESSAGE = 500


def run(job: Job) -> Report:
    """`pytest -m gpu`; interrupted at the end of its time, it still writes its XML."""
    xml = job.out / _XML
    xml.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-m", _MARKER, "-q", "-rfEs"),
        *("-p", "no:cacheprovider", f"--junitxml={xml}", str(job.tests)),
    ]
    status, in_time = _stopped_in_time(
        command, job.out / _LOG, job.left_s - _STOPPING_S
    )
    summary = _summary(xml)
    result = {"exit_status": status, "in_time": in_time, **summary}
    write_json(job.out / _RESULT, {"machine": facts(), **result})
    failures = [f"{t['name']}: {t['message']}" for t in summary["failed"]]
    if not in_time:
        failures.append("the tests did not end in time")
    elif status == _NONE_COLLECTED:
        failures.append(f"no test is marked {_MARKER!r} in {job.tests}")
    elif summary["skipped"] and not summary["passed"] and not failures:
        failures.append(f"all {summary['skipped']} tests were skipped; see {_LOG}")
    elif status and not failures:
        failures.append(f"pytest ended with exit status {status}; see {_LOG}")
    text = "{passed} passed, {skipped} skipped, {broken} failed".format(
        broken=len(summary["failed"]), **summary
    )
    return Report(in_time, tuple(failures[:_SHOWN]), text)


def _stopped_in_time(command: list[str], log: Path, seconds: float) -> tuple[int, bool]:
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(max(seconds, 1.0)), True
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        except BaseException:
            process.kill()
            raise
        try:
            return process.wait(_STOPPING_S), False
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(), False


def _summary(xml: Path) -> dict[str, Any]:
    try:
        cases = list(ET.parse(xml).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        cases = []
    failed, skipped, passed = [], 0, 0
    seconds = 0.0
    for case in cases:
        seconds += float(case.get("time", "0"))
        trouble = case.find("failure")
        if trouble is None:
            trouble = case.find("error")
        if trouble is not None:
            name = f"{case.get('classname')}::{case.get('name')}"
            message = (trouble.get("message") or "")[:_MESSAGE]
            failed.append({"name": name, "message": message})
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": failed, "seconds": seconds}
