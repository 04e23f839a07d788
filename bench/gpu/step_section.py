"""`python -m bench.gpu.step_section FILE …`: one section of `steps`, alone.

It has a process of its own: what crashes, hangs or spoils the device ends with it. What
it has found so far is in FILE whenever it ends.
"""

import argparse
import functools
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.deepbench import record
from bench.gpu.job import RULE, Job
from bench.gpu.keeping import Keeper
from bench.gpu.step_rivals import Case, TorchStep, ours, sampled
from bench.gpu.store import write_json
from bench.gpu.turns import in_turn
from mucudnn.errors import MucudnnError
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["EAGER", "Section"]

EAGER = "torch_eager"
_RULE = StoppingRule(min_samples=3, max_samples=6, margin=0.01, budget_ms=4000.0)
_WARM = 2
_WORKSPACE = "1GiB"
"""Of each kernel; PyTorch's take what they like."""


@dataclass
class Section:
    """Rivals of one case, each timed in turn with eager PyTorch.

    Attributes:
        job: Where, and until when.
        case: What is trained.
        file: What is found is written to it after each rival.
    """

    job: Job
    case: Case
    file: Path
    _found: dict[str, Any] = field(
        default_factory=lambda: {"rivals": {}, "errors": {}}, init=False
    )

    def run(self, *, compiled: bool) -> dict[str, Any]:
        """Ours and ours as graphs; or, if `compiled`, PyTorch's compiled step."""
        eager = TorchStep(self.case, self._device, compiled=False)
        if compiled:
            self._try("torch_compile", eager, self._compiled)
            return self._found
        with self.job.open_cache() as cache:
            tuner = self._tuner(cache)
            try:
                for name, replay in (("ours", False), ("ours_graph", True)):
                    make = functools.partial(self._ours, tuner, replay)
                    self._try(name, eager, make)
            finally:
                tuner.close()
                record(self.job, cache)
        return self._found

    @property
    def _device(self) -> str:
        return "cuda" if self.job.backend_name.startswith("cuda") else "cpu"

    def _tuner(self, cache: BenchmarkCache) -> Tuner:
        keep = functools.partial(record, self.job, cache)
        return Tuner(
            backend=self.job.backend,
            cache=cache,
            batch_policy="undivided",
            planner="undivided",
            workspace_limit=_WORKSPACE,
            rule=RULE,
            progress=lambda _: self.job.keep(keep),
        )

    def _try(
        self,
        name: str,
        eager: TorchStep,
        make: Callable[
            [], tuple[Callable[[], Any], dict[str, Any], Callable[[], None]]
        ],
    ) -> None:
        """Time a rival and eager PyTorch; what fails is told, and costs no other."""
        begun = time.monotonic()
        try:
            step, facts, close = make()
            try:
                timed = self._timed(name, step, eager)
            finally:
                close()
        except Exception as e:  # of CUDA, of PyTorch's compiler, of ours
            if not isinstance(e, MucudnnError):
                traceback.print_exc()
            self._found["errors"][name] = f"{type(e).__name__}: {e}"[:2000]
        else:
            seconds = time.monotonic() - begun
            self._found["rivals"][name] = {**timed, **facts, "seconds": seconds}
        write_json(self.file, self._found)

    def _timed(
        self, name: str, step: Callable[[], Any], eager: TorchStep
    ) -> dict[str, Any]:
        wait, losses = self._wait(), dict[str, float]()
        rivals: dict[str, Callable[[], Any]] = {name: step, EAGER: eager}
        for rival, one in rivals.items():
            for _ in range(_WARM):  # the second step captures, or has its plans
                loss = one()
            losses[rival] = float(loss)
        host_ms = {rival: _host_ms(one, wait) for rival, one in rivals.items()}
        samplers = {rival: sampled(one, wait) for rival, one in rivals.items()}
        found = in_turn(samplers, _RULE, self.job.deadline)
        return {
            "ms": found[name].time_ms,
            "noise_ms": found[name].noise_ms,
            "eager_ms": found[EAGER].time_ms,
            "eager_noise_ms": found[EAGER].noise_ms,
            "ratio": found[name].time_ms / found[EAGER].time_ms,
            "host_ms": host_ms,
            "losses": losses,
        }

    def _wait(self) -> Callable[[], Any]:
        import torch

        return torch.cuda.synchronize if self._device == "cuda" else _nothing

    def _ours(self, tuner: Tuner, replay: bool) -> Any:
        begun = time.monotonic()
        trainer = ours(self.case, tuner, replay=replay)
        facts = {
            "planning_s": time.monotonic() - begun,
            "peak_bytes": trainer.peak_bytes,
            "nodes": len(trainer.graph.nodes),
        }
        images, labels = self.case.data()
        return lambda: _Loss(trainer.step(images, labels)), facts, trainer.close

    def _compiled(self) -> Any:
        step = TorchStep(self.case, self._device, compiled=True)
        begun = time.monotonic()
        step()
        facts = {"planning_s": time.monotonic() - begun}
        return step, facts, _nothing


class _Loss:
    """Of a step of ours, read where it is made a number."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __float__(self) -> float:
        return float(self._result.loss)


def _host_ms(step: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """What launching one step costs, the device idle before it."""
    wait()
    begun = time.perf_counter()
    step()
    ms = 1e3 * (time.perf_counter() - begun)
    wait()
    return ms


def _nothing() -> None:
    pass


def main() -> int:
    """0 once all rivals were tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("network")
    parser.add_argument("precision")
    parser.add_argument("layout")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--image", type=int, required=True)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    case = Case(
        options.network,
        options.batch,
        options.image,
        options.precision,
        options.layout,
    )
    job = Job(
        out=options.file.parent,
        backend_name=options.backend,
        ends=time.monotonic() + options.seconds,
        keeper=Keeper(options.file.parent, None),  # writes recordings, packs nothing
    )
    Section(job, case, options.file).run(compiled=options.compiled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
