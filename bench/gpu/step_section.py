"""`python -m bench.gpu.step_section FILE …`: one section of `steps`, alone.

It has a process of its own: what crashes, hangs or spoils the device ends with it. What
it has found so far is in FILE whenever it ends.

A step is what a loop of training repeats: a batch is handed over, from page-locked
memory for PyTorch, forward, backward, momentum. Nobody reads the loss. In half
precision PyTorch has autocast and a `GradScaler`, ours its dynamic loss scale.
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

from bench.gpu.choice import in_turn
from bench.gpu.deepbench import record
from bench.gpu.job import RULE, Job, Keeper, write_json
from mucudnn.errors import MucudnnError
from mucudnn.models import get_model
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

_STEPS = 4
"""Timed together, so that the host may run ahead as it does in training."""

_SEED = 0


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        network: A name in `bench.torch.networks.NETWORKS`.
        batch: Images in a step.
        image: Height and width of one.
        precision: `float32`, with TF32 where the hardware has it, or a half type.
        layout: `NCHW` or `NHWC`.
    """

    network: str
    batch: int
    image: int
    precision: str
    layout: str

    @property
    def narrow(self) -> str | None:
        """The half type, if there is one."""
        return None if self.precision == "float32" else self.precision

    @functools.cached_property
    def graph(self) -> Any:
        """The network's."""
        return get_model(self.network)(self.batch, image=self.image)

    def data(self) -> tuple[Any, Any]:
        """Images and labels, on the host."""
        import numpy as np

        rng = np.random.default_rng(_SEED)
        tensors = self.graph.tensors
        images = rng.standard_normal(tensors["image"].shape, np.float32)
        return images, rng.integers(0, 2, tensors["label"].shape)


def ours(case: Case, tuner: Tuner, *, replay: bool, plans: Any = None) -> Trainer:
    """A trainer with momentum; its launches are replayed as graphs if asked to."""
    return Trainer(
        case.graph,
        tuner=tuner,
        optimizer="momentum",
        learning_rate=1e-3,
        precision=case.narrow,
        loss_scale="dynamic" if case.narrow == "float16" else None,
        layout=case.layout,
        replay=replay,
        plans=plans,
    )


class TorchStep:
    """PyTorch's step, eager or compiled by its default compiler.

    Args:
        case: What.
        device: Where.
        compiled: Whether the network is.
    """

    def __init__(self, case: Case, device: str, *, compiled: bool) -> None:
        import torch

        from bench.torch.networks import NETWORKS

        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
        self._torch, self._device = torch, device
        last = case.layout == "NHWC"
        form = torch.channels_last if last else torch.contiguous_format
        torch.manual_seed(_SEED)
        network = NETWORKS[case.network]().train()
        network = network.to(device, memory_format=form)
        self._optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
        self._network = torch.compile(network) if compiled else network
        self._dtype = None if case.narrow is None else getattr(torch, case.narrow)
        scaled = case.narrow == "float16"
        self._scaler = torch.amp.GradScaler(device, enabled=scaled)
        images, labels = (torch.from_numpy(a) for a in case.data())
        self._batch = images.to(memory_format=form), labels
        if device == "cuda":
            self._batch = tuple(one.pin_memory() for one in self._batch)

    def __call__(self) -> Any:
        """One step; its loss, on the device."""
        torch = self._torch
        x, y = (one.to(self._device, non_blocking=True) for one in self._batch)
        self._optimizer.zero_grad()
        half = self._dtype is not None
        with torch.autocast(self._device, dtype=self._dtype, enabled=half):
            loss = torch.nn.functional.cross_entropy(self._network(x), y)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()


def sampled(
    step: Callable[[], object], wait: Callable[[], object]
) -> Callable[[], float]:
    """Times some steps together: ms of one."""

    def sample() -> float:
        wait()
        begun = time.perf_counter()
        for _ in range(_STEPS):
            step()
        wait()
        return 1e3 * (time.perf_counter() - begun) / _STEPS

    return sample


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

        return torch.cuda.synchronize if self._device == "cuda" else lambda: None

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
        return step, facts, lambda: None


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
