"""What it costs a planned PyTorch step to see that its plan still holds.

Before each step the plan's guards are checked: which tensors there are, their layouts
and memory, and all Python state that the capture has read. Nothing else runs here.
"""

import gc
import time
from typing import Any

__all__ = ["rows", "time_guard_check"]

_ROUNDS = 1000
_BARS_US = {"resnet18": 60.0, "gpt, 12 layers": 150.0}


def rows() -> list[dict[str, Any]]:
    """Return one row for each network; none without PyTorch."""
    try:
        import torch
    except ImportError:
        return []
    import mucudnn.torch as mt
    from bench.torch import zoo

    config = zoo.GPTConfig(layers=12, width=64, heads=4, length=32)
    cases = {"resnet18": zoo.build("resnet18"), "gpt, 12 layers": zoo.gpt(2, config)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = []
        for name, case in cases.items():
            optimizer: torch.optim.Optimizer
            if name == "resnet18":
                optimizer = torch.optim.SGD(case.model.parameters(), 0.1, momentum=0.9)
            else:
                optimizer = torch.optim.AdamW(case.model.parameters(), 1e-3)
            step = mt.train_step(case.model, case.loss_fn, optimizer, cache=None)
            step(*case.batch)  # which makes the state of the optimizer
            found.append(
                {
                    "model": name,
                    "modules": sum(1 for _ in case.model.modules()),
                    "check_us": round(time_guard_check(step, case.batch), 1),
                    "bar_us": _BARS_US[name],
                }
            )
    finally:
        torch.set_num_threads(threads)
    return found


def time_guard_check(step: Any, batch: tuple[Any, ...]) -> float:
    """Return the µs in which a step finds the plan that it has for a batch.

    Args:
        step: A `TrainStep` that has a plan for the batch.
        batch: As the step is called with it.
    """
    from mucudnn.torch.capture.step_tensors import Batch

    arguments = Batch.of(batch, {})

    def check() -> Any:
        return step._planned.find(arguments)

    if check()[0] is None:
        raise ValueError("the step has no plan for this batch; run it before")
    least = float("inf")
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(_ROUNDS):  # one by one: a burst is interrupted on a busy machine
            start = time.perf_counter_ns()
            check()
            least = min(least, (time.perf_counter_ns() - start) / 1e3)
    finally:
        if collecting:
            gc.enable()
    return least
