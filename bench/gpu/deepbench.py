"""DeepBench's 3x3 and 5x5 layers and AlexNet: every engine, divided and undivided.

Stage by stage (`bench.gpu.work.STAGES`), layer by layer; recordings are written as they
grow. A layer whose time ran out is written as incomplete and taken up again by the next
run, from the cache.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any

from bench.gpu.job import RECORDINGS, RULE, Job, Report, read_json, write_text
from bench.gpu.verdicts import digest, digest_text
from bench.gpu.work import (
    LIMITS,
    STAGES,
    Stage,
    deepbench_layers,
    key_of,
    recording_name,
)
from mucudnn.errors import MucudnnError
from mucudnn.ir.measurement import Measurement, Recording, Verdict
from mucudnn.ir.numerics import RowStatus
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.store.recordings import write_recording
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import Comparison, compare
from mucudnn.suites import Layer

FILES = ("comparison-*.json", "deepbench.json", "deepbench.txt", RECORDINGS)

_WRITING = 0.03
"""Share of a part's time for the recording, which grows with it."""
_WORTH_S = 0.5
"""With less time than this no layer is begun."""
_OUT_OF_TIME = "the time limit was reached"


def run(job: Job) -> Report:
    """Go on where the last run stopped."""
    measuring = job.left_s * (1 - _WRITING)
    ends = time.monotonic() + measuring
    failures: list[str] = []
    with job.open_cache() as cache:
        stages = [_Stage(job, stage, cache, ends) for stage in STAGES]
        try:
            for stage in stages:
                failures += stage.run()
        finally:
            job.keep(functools.partial(_conclude, job, cache, stages), now=True)
    complete = all(stage.complete for stage in stages)
    result = digest(job.out, STAGES)
    return Report(complete, tuple(failures), digest_text(result, brief=True))


def record(job: Job, cache: BenchmarkCache, *only: str) -> None:
    """Write what is measured into files, one a data type and layout.

    Args:
        job: Where.
        cache: What.
        only: Names of the files that are written; all by default.
    """
    device = job.backend.device
    rows_of: dict[str, list[Measurement]] = {}
    verdicts_of: dict[str, list[Verdict]] = {}
    for row in cache.rows(device.fingerprint):
        rows_of.setdefault(_file_of(row), []).append(row)
    for verdict in cache.verdicts(device.fingerprint):
        verdicts_of.setdefault(_file_of(verdict), []).append(verdict)
    for name, rows in rows_of.items():
        if only and name not in only:
            continue
        recording = Recording(
            environments={device.fingerprint: device.description()},
            alignments={device.fingerprint: job.backend.split_alignment},
            measurements=tuple(rows),
            verdicts=tuple(verdicts_of.get(name, ())),
        )
        write_recording(job.out / name, recording)


def _file_of(of: Measurement | Verdict) -> str:
    return recording_name(of.problem.dtype, of.problem.layout)


def _conclude(job: Job, cache: BenchmarkCache, stages: "Sequence[_Stage]") -> None:
    if any(stage.changed for stage in stages):
        record(job, cache)
    result = digest(job.out, STAGES)
    job.write("deepbench.json", result)
    write_text(job.out / "deepbench.txt", digest_text(result) + "\n")


class _Stage:
    """One comparison, written anew after each of its layers."""

    def __init__(
        self, job: Job, stage: Stage, cache: BenchmarkCache, ends: float
    ) -> None:
        self._job, self._stage, self._ends = job, stage, ends
        self._layers = deepbench_layers(job)
        self._cache = cache
        known = read_json(job.out / stage.file).get("layers", [])
        self._rows: dict[str, dict[str, Any]] = {row["key"]: row for row in known}
        self.changed = False

    @property
    def complete(self) -> bool:
        """Whether every layer is done."""
        return all(self._is_done(layer) for layer in self._layers)

    def run(self) -> list[str]:
        """Do what is left; returns failures."""
        left = [layer for layer in self._layers if not self._is_done(layer)]
        if not left or self._left_s < _WORTH_S:
            return []
        failures = []
        tuner = Tuner(
            backend=self._job.backend,
            cache=self._cache,
            batch_policy="powers_of_two",
            numerics=self._stage.numerics,
            rule=RULE,
            prune=False,  # a recording is of everything
        )
        try:
            for layer in left:
                if self._left_s < _WORTH_S:
                    break
                try:
                    self._one(tuner, layer)
                except MucudnnError as e:
                    failures.append(f"{self._stage.file}: {layer.name}: {e}")
        finally:
            tuner.close()
        return failures

    @property
    def _left_s(self) -> float:
        return self._ends - time.monotonic()

    def _is_done(self, layer: Layer) -> bool:
        row = self._rows.get(key_of(layer.name, layer.problem))
        return row is not None and bool(row["complete"])

    def _one(self, tuner: Tuner, layer: Layer) -> None:
        begun = time.monotonic()
        problem = self._stage.of(layer.problem)
        one = Layer(layer.name, problem, layer.count)
        found = compare(tuner, [one], LIMITS, time_limit_s=self._left_s)
        (result,) = found.layers
        table = result.table
        short = any(p.status is RowStatus.LIMITED for p in table.perfs) or any(
            _OUT_OF_TIME in (o.reason or "") for o in result.outcomes
        )
        whole = table.fastest(problem.batch)
        self._rows[key_of(layer.name, problem)] = {
            "key": key_of(layer.name, problem),
            "complete": not short,
            "seconds": time.monotonic() - begun,
            "rows": len(table.usable),
            "undivided_unlimited": whole
            and {
                "algo": whole.algo,
                "time_ms": whole.time_ms,
                "workspace": whole.workspace,
            },
            **result.to_json(),
            "excluded": [
                {"algo": algo, "reason": reason}
                for algo, reason in result.failures
                if RowStatus.of(reason) is not RowStatus.REFUSED
            ],
        }
        self.changed = True
        self._write(found)
        self._job.keep(lambda: record(self._job, self._cache, self._stage.recording))

    def _write(self, latest: Comparison) -> None:
        order = [key_of(layer.name, layer.problem) for layer in self._layers]
        layers = [self._rows[key] for key in order if key in self._rows]
        head = {k: v for k, v in latest.to_json().items() if k != "summary"}
        self._job.write(
            self._stage.file,
            {
                **head,
                "dtype": self._stage.dtype,
                "layout": self._stage.layout,
                "interrupted": not self.complete,
                "layers": layers,
            },
        )
