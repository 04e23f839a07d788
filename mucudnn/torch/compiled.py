"""A budget for models compiled with `torch.compile`: both halves are one schedule.

    model = torch.compile(model, backend=mt.backend(budget="8GiB"))

AOTAutograd hands over forward and backward as one graph. It is planned as one and cut
where the forward pass has ended. What the second half still needs are ordinary tensors,
which autograd keeps: those on the device, those on the host, and states of the random
generator. So a forward pass without a backward pass leaves nothing behind, two may be
under way at once, and autograd sees what has been changed between the halves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

from mucudnn.runtime.environment import USERS
from mucudnn.torch.capture.joint import Joint, bind_halves
from mucudnn.torch.execution.program import Segment
from mucudnn.torch.fusion.switch import fusing_of
from mucudnn.torch.measure import measured
from mucudnn.torch.plan_cache.store import PlanCacheChoice, PlanStore, open_plans
from mucudnn.torch.planning import Planner, as_budget
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["CompileBackend", "backend", "compile_graph"]


def backend(
    *,
    budget: float | str | None = None,
    cache: PlanCacheChoice = USERS,
    inductor: bool = False,
) -> "CompileBackend":
    """A backend for `torch.compile` that keeps a budget in training.

    The budget counts what one compiled graph has in use, forward to backward: its
    parameters and buffers, activations, gradients, results and scratch memory. The
    other inputs, the gradients that come in, and the optimizer's state are the
    caller's. Where a model is compiled to several graphs each keeps the budget for
    itself. Without gradients nothing is planned. Batches of several sizes need
    `dynamic=False`: each has a plan of its own. A backward pass uses up what was kept
    for it: `retain_graph=True` is refused by PyTorch's setting `donated_buffer`, which
    must stay on.

    Args:
        budget: Bytes, or a size such as "8GiB"; None plans without a limit.
        cache: A folder to remember measurements and plans in, by default one in the
            user's cache directory; None remembers nothing.
        inductor: Whether neighbouring operations become kernels that PyTorch's Inductor
            compiles, where these are faster and the budget allows. They compute what
            the operations do, up to rounding.
    """
    return CompileBackend(as_budget(budget), open_plans(cache), inductor=inductor)


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What `torch.compile(backend="mucudnn", options={"budget": ...})` calls.

    Raises:
        ValueError: An option is not known.
    """
    given = dict(options or {})
    budget, inductor = given.pop("budget", None), given.pop("inductor", False)
    if given:
        raise ValueError(
            f"unknown option {next(iter(given))!r}; there are 'budget' and 'inductor'"
        )
    made = CompileBackend(as_budget(budget), open_plans(USERS), inductor=inductor)
    return made(module, inputs)


class CompileBackend:
    """Plans every graph that it is given.

    Args:
        budget: Bytes for each graph.
        plans: What was measured and planned before; None remembers nothing.
        inductor: Whether operations are fused.

    Attributes:
        plans: What was decided, in the order in which graphs were compiled.
    """

    def __init__(
        self, budget: float, plans: PlanStore | None = None, *, inductor: bool = False
    ) -> None:
        self._budget = budget
        self._plans = plans or PlanStore()
        self._fusing = fusing_of(inductor, self._plans)
        self._halves: dict[Any, Segment] = {}
        self.plans: list[TorchPlan] = []

    def __call__(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile one graph."""
        compiler = aot_autograd(
            fw_compiler=self._compiled,
            bw_compiler=self._compiled,
            partition_fn=self._partitioned,
        )
        found: Callable[..., Any] = compiler(module, inputs)
        return found

    def _partitioned(
        self,
        joint: torch.fx.GraphModule,
        joint_inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Two graphs of one node each: the halves of one planned program."""
        del joint_inputs
        parts = Joint.of(joint, num_fwd_outputs)
        parts.check()
        with _disable_current_modes(), torch.no_grad():
            lowered = parts.lowered()
            own = {lowered.inputs[i] for i in static_lifetime_input_indices or ()}
            given = {t for t in lowered.inputs if t is not None} - own
            profile = self._plans.profile(lowered, measured)
            planner = Planner(lowered, profile, given)
            if self._fusing is None:
                plan = planner.plan(self._budget, self._plans)
            else:
                planner, plan = self._fusing.plan(planner, self._budget)
            halves = bind_halves(planner.lowered, plan.plan.schedule, parts.count)
        source = f"{halves.forward.source}\n{halves.backward.source}"
        self.plans.append(replace(plan, source=source))
        return parts.split(halves, self._halves)

    def _compiled(
        self, module: torch.fx.GraphModule, example: Sequence[Any]
    ) -> Callable[..., Any]:
        """One half, or a graph that no gradient is asked of."""
        del example
        targets = (node.target for node in module.graph.nodes)
        segment = next(
            (self._halves[t] for t in targets if _is_half(t, self._halves)), None
        )

        def run(args: list[Any]) -> Any:
            if segment is not None:
                with torch.no_grad():
                    return segment.run(args)
            mine = list(args)
            args.clear()
            return module(*mine)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _is_half(target: Any, halves: Mapping[Any, Segment]) -> bool:
    return callable(target) and target in halves
