"""Eager updates: optimizers whose update is not captured, measured, planned and run.

Forward and backward are planned in the budget less what the optimizer holds. During the
update, parameters, buffers, all gradients and the step's results are in memory, and the
update needs the bytes that were measured: the budget has to hold both.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.liveness import rounded
from mucudnn.torch.capture.optimizers import make_state
from mucudnn.torch.capture.step import CapturedStep
from mucudnn.torch.capture.step_tensors import StepParts
from mucudnn.torch.costs.meters import meter_of
from mucudnn.torch.execution.copies import host_bytes
from mucudnn.torch.lowering.lowered import Layout
from mucudnn.torch.plan import TorchPlan, UpdateBytes
from mucudnn.torch.planning import too_small
from mucudnn.torch.source_lines import bytes_in_storages, storage_of

_PlannerT = TypeVar("_PlannerT")

_UPDATE = "the optimizer's update"


@dataclass(frozen=True)
class EagerUpdate:
    """The update of an optimizer that runs eagerly, behind planned passes.

    Attributes:
        reason: Why the update is not captured.
        copied_bytes: Bytes of the copies of gradients that it needs.
        peak_bytes: The most that is in use during the update.
    """

    usage: UpdateBytes
    reason: str
    copied_bytes: int
    peak_bytes: int

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        captured: CapturedStep,
        parts: StepParts,
        reason: str,
        *,
        parameters: Mapping[str, torch.Tensor] | None = None,
        foreach: bool | None = None,
        usage: UpdateBytes | None = None,
    ) -> "EagerUpdate | None":
        """Describe the update behind captured passes; None if it is captured itself.

        `reason` says why it is not captured. The optimizer's `parameters` by name are
        given if they are not those of `parts`; without `usage` the update is measured.

        Raises:
            UnsupportedError: The update cannot be measured; says why.
        """
        if captured.gradients is None:
            return None
        names = [name for name in captured.gradients if name]
        if usage is None:
            of_name = parts.parameters if parameters is None else parameters
            try:
                usage = measured_update(
                    optimizer, [id(of_name[name]) for name in names], foreach=foreach
                )
            except UnsupportedError as e:
                raise UnsupportedError(
                    f"the optimizer's update cannot be planned: {reason}. It cannot "
                    f"run eagerly either: {e}. torch.compile(model, "
                    "backend=mt.backend(budget=...)) keeps forward and backward "
                    "within a budget with any optimizer"
                ) from e
            if usage.closure and "" in captured.gradients:
                raise scaled_closure_error(optimizer)
        # The passes return loss and extras, the gradients, perhaps whether some are
        # not finite, and then the new value of every input.
        (output,) = captured.module.graph.find_nodes(op="output")
        values = [node.meta.get("val") for node in output.args[0]]
        values = values[: len(values) - len(captured.names)]
        end = len(values) - (len(captured.gradients) - len(names))
        gradients = values[end - len(names) : end]
        copied = copies_needed(gradients, [parts.parameters[name] for name in names])
        copied_bytes = sum(
            rounded(gradient.nbytes)
            for gradient, needed in zip(gradients, copied, strict=True)
            if needed
        )
        returned = [value for value in values if isinstance(value, torch.Tensor)]
        held = bytes_in_storages(parts.tensors()) + bytes_in_storages(returned)
        return cls(usage, reason, copied_bytes, held + copied_bytes + usage.peak)

    def plan(
        self, budget: float, plan_passes: Callable[[float], tuple[_PlannerT, TorchPlan]]
    ) -> tuple[_PlannerT, TorchPlan]:
        """Plan the passes in what the optimizer leaves of a budget.

        Raises:
            PlanningError: The passes or the update do not fit; says what would do.
        """
        try:
            planner, plan = plan_passes(max(0.0, budget - self.usage.persistent))
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            raise self._refusal(
                budget, self.with_passes(e.least_bytes), e.node
            ) from None
        if self.peak_bytes > budget:
            raise self._refusal(budget, self.peak_bytes, None)
        return planner, replace(
            plan,
            budget=budget,
            reservable_budget=plan.reservable_budget
            and self.with_passes(plan.reservable_budget),
            resident_bytes=plan.resident_bytes + self.usage.state,
            own_update=self.usage,
            update_peak_bytes=self.peak_bytes,
            update_reason=self.reason,
        )

    def with_passes(self, least: int) -> int:
        """Return the least budget of passes and update from that of the passes."""
        return max(least + self.usage.persistent, self.peak_bytes)

    def append_to(self, graph: Graph, profile: Profile) -> tuple[Graph, Profile]:
        """Append the update to the passes' graph and costs, as a node without time."""
        state = TensorSpec(
            f"{_UPDATE}: state", (self.usage.persistent,), "uint8", Role.BORROWED
        )
        node = Node(_UPDATE, "own_update", (state.name,), (), phase=Phase.UPDATE)
        scratch = self.usage.peak - self.usage.persistent + self.copied_bytes
        tensors = {**graph.tensors, state.name: state}
        return Graph(tensors, (*graph.nodes, node), graph.outputs), replace(
            profile,
            node_ms={**profile.node_ms, node.name: 0.0},
            workspaces={**profile.workspaces, node.name: scratch},
        )

    def _refusal(self, budget: float, least: int, node: str | None) -> PlanningError:
        return too_small(
            f"the step does not fit into {exact_bytes(int(budget))}: its optimizer "
            f"updates eagerly ({self.reason}), which takes all gradients and "
            f"{exact_bytes(self.usage.peak)} more; the least budget that works is "
            f"{exact_bytes(least)}",
            *(budget, least, node),
        )


# Measuring an update, on a copy of the optimizer.
#
# The copy has parameters, gradients and state of its own, on the CPU in memory that is
# not of PyTorch's allocator: only what an update adds is counted. It makes a few
# updates, as mostly the first one makes the state. An update that decides by values is
# assumed never to need more than those made here. Gradients are made up, always the
# same ones; so are parameters without data.


_UPDATES = 3
_SMALL = 1e-2
"""Scale of made-up gradients."""
_MOST_OF_A_SEARCH = 4
"""Gradients that a line search holds beside those it returns."""


def measured_update(
    optimizer: torch.optim.Optimizer,
    trained: Collection[int],
    *,
    foreach: bool | None = None,
) -> UpdateBytes:
    """Measure a few updates of a copy of an optimizer.

    The parameters that have gradients are `trained`, by `id`. `foreach` is used where
    the optimizer leaves it open: kernels over many tensors, as on a GPU, need more.

    Raises:
        UnsupportedError: It cannot be copied, its update fails, or it needs more with
            every one.
    """
    first: Exception | None = None
    for closure in (False, True):
        try:
            return _measured(optimizer, trained, foreach, closure=closure)
        except UnsupportedError:
            raise
        except Exception as e:  # of what kind is up to the optimizer
            first = first or e
    raise UnsupportedError(
        f"{type(optimizer).__name__}.step() fails on a copy of it, with "
        f"{type(first).__name__}: {first}"
    ) from first


def check_room(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to measure an optimizer whose copy would not fit into this machine.

    The copy has parameters and gradients, and its state may be as large.

    Raises:
        UnsupportedError: Says how much memory there is.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    needed = 3 * sum(p.nbytes for p in parameters if p.is_cpu or p.is_meta)
    there = CpuDevice().available_bytes()
    if needed > there:
        raise UnsupportedError(
            f"{type(optimizer).__name__}'s update cannot be recorded, so its memory "
            "must be measured by running it on copies of its parameters and "
            f"gradients: they take about {exact_bytes(needed)}, and this machine has "
            f"{exact_bytes(there)}; use a machine with more memory, a smaller model, "
            "or an optimizer whose update can be recorded, such as AdamW"
        )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors that an optimizer has beside its parameters."""
    groups = optimizer.param_groups
    own = {storage_of(p) for group in groups for p in group["params"]}
    return bytes_in_storages(t for t in _tensors(optimizer) if storage_of(t) not in own)


def _measured(
    optimizer: torch.optim.Optimizer,
    trained: Collection[int],
    foreach: bool | None,
    *,
    closure: bool,
) -> UpdateBytes:
    """Measure a few updates of a copy of an optimizer, with or without a closure."""
    twin, copies = _copied(optimizer)
    for group in twin.param_groups:
        if "foreach" in group and group["foreach"] is None:
            group["foreach"] = foreach
    make_state(twin)
    parameters = [copies[at] for at in trained if at in copies]
    device = parameters[0].device
    random = torch.Generator(device).manual_seed(0)

    def draw(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.normal_(0, _SMALL, generator=random)

    def prepared(block: int) -> Callable[[], object]:
        def run_passes() -> torch.Tensor:
            """Return a loss, and make gradients, that a search finds no minimum of."""
            for parameter in parameters:
                parameter.grad = None
            taken = torch.empty(block, dtype=torch.uint8, device=device)
            del taken
            for parameter in parameters:
                parameter.grad = draw(torch.empty_like(parameter.detach()))
            return torch.rand((), generator=random, device=device)

        for parameter in parameters:
            parameter.grad = (
                None if closure else draw(_copied_tensor(parameter.detach()))
            )
        return lambda: twin.step(run_passes) if closure else twin.step()

    def most_bytes(block: int) -> int:
        """Return the most that an update allocates; passes have a block for a while."""
        return meter_of(device).most_bytes([lambda: prepared(block)])[0]

    peak = 0
    states = [state_bytes(twin)]
    for _ in range(_UPDATES):
        peak = max(peak, most_bytes(0) + states[-1])
        states.append(state_bytes(twin))
    persistent = states[-1]
    if closure:
        block = peak + (1 << 20)
        persistent = max(persistent, states[-1] + most_bytes(block) - block)
    more = _still_to_come(twin)
    if states[-1] > states[-2] and not more:
        raise UnsupportedError(
            f"{type(twin).__name__} has {exact_bytes(states[-1])} of state after "
            f"{_UPDATES} steps and had {exact_bytes(states[-2])} one step before: no "
            "budget can be guaranteed while its state grows"
        )
    gradients = sum(p.nbytes for p in parameters) if closure else 0
    return UpdateBytes(
        state=rounded(states[-1] + more),
        persistent=rounded(persistent + more),
        peak=rounded(max(peak + more - gradients, persistent + more)),
        closure=closure,
    )


def _still_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Return how much L-BFGS's history still grows, and what a line search may hold."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 0
    group = optimizer.param_groups[0]
    state = optimizer.state[group["params"][0]]
    size = int(group["history_size"])
    missing = 2 * (size - len(state.get("old_dirs") or ()))
    missing += _MOST_OF_A_SEARCH if group["line_search_fn"] else 0
    flat = rounded(sum(p.nbytes for p in group["params"]))
    return missing * flat + 2 * size * rounded(1)


def _copied(
    optimizer: torch.optim.Optimizer,
) -> tuple[torch.optim.Optimizer, dict[int, torch.Tensor]]:
    """Copy an optimizer without hooks; also return its parameters by the old `id`.

    PyTorch's own way to copy one would drop a subclass's attributes.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [*parameters, *_tensors(optimizer)]
    copies = {id(tensor): _copied_tensor(tensor) for tensor in tensors}
    memo: dict[int, Any] = {id(optimizer): twin, **copies}
    rest = {
        key: OrderedDict() if key.endswith("hooks") else value
        for key, value in vars(optimizer).items()
        if key != "step"  # a schedule's, which is bound to the other
    }
    try:
        vars(twin).update(copy.deepcopy(rest, memo))
    except (TypeError, RuntimeError) as e:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be copied, so the memory of its "
            f"update cannot be measured: {e}"
        ) from e
    return twin, {id(p): copies[id(p)] for p in parameters}


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield all tensors in an optimizer's state and attributes."""
    held = {k: v for k, v in vars(optimizer).items() if k != "state"}
    for leaf in pytree.tree_leaves([held, list(optimizer.state.values())]):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _copied_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, on the CPU into memory that is not of PyTorch's allocator."""
    value = tensor.detach()
    if value.is_cpu or value.is_meta:
        layout = replace(Layout.of(value), offset=0)
        made = layout.view_of(host_bytes(layout.extent * value.itemsize))
    else:
        made = torch.empty_like(value)
    if not value.is_meta:
        made.copy_(value)
    elif made.is_floating_point():
        made.normal_(0, _SMALL, generator=torch.Generator().manual_seed(0))
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


# Running an update behind a planned forward and backward pass.
#
# The optimizer finds gradients where it looks for them, in memory of their own. Behind
# the update they are freed, and a parameter's `grad` is again what it was before.


def own_update(
    optimizer: torch.optim.Optimizer,
    passes: Callable[[], list[Any]],
    parameters: Sequence[torch.Tensor],
    *,
    begin: Callable[[], None],
    closure: bool,
    scaled: bool,
) -> list[Any]:
    """Run one step; return the results of its first forward pass but for gradients.

    Args:
        optimizer: Makes the update.
        passes: Runs forward and backward; returns results, then a gradient for each
            parameter and, with a scaler, whether some is not finite.
        parameters: Those that have a gradient.
        begin: Called before the first parameter is written, and more often.
        closure: Whether the optimizer runs the passes.
        scaled: Whether there is a scaler, so that steps may be skipped.
    """

    def give_gradients(results: list[Any]) -> None:
        """Take gradients off the results and store them as autograd does."""
        start = len(results) - len(parameters)
        gradients = results[start:]
        del results[start:]
        copied = copies_needed(gradients, parameters)
        rows = zip(parameters, gradients, copied, strict=True)
        for parameter, gradient, needed in rows:
            if needed:
                gradient = torch.empty_like(parameter.detach()).copy_(gradient)
            parameter.grad = gradient

    held = [p for group in optimizer.param_groups for p in group["params"]]
    with own_gradients(held) as before:
        if not closure:
            results = passes()
            skipped = scaled and bool(results.pop())
            give_gradients(results)
            if not skipped:
                begin()
                # Updates are not cast: users call them outside of autocast.
                with torch.autocast(held[0].device.type, enabled=False):
                    optimizer.step()
            return results
        first: list[list[Any]] = []
        versions = [parameter._version for parameter in parameters]

        def again() -> Any:
            if versions != [parameter._version for parameter in parameters]:
                begin()
            for parameter in before:
                parameter.grad = None
            results = passes()
            give_gradients(results)
            if not first:
                first.append(results)
            begin()  # from here on the optimizer may write
            return results[0]

        optimizer.step(again)
        return first[0]


def scaled_closure_error(optimizer: torch.optim.Optimizer) -> UnsupportedError:
    """Return the error of steps with a scaler whose optimizer needs a closure."""
    return UnsupportedError(
        f"{type(optimizer).__name__} needs a closure, which a step with a scaler does "
        "not pass; train without scaler=..., for example in bfloat16"
    )


def copies_needed(
    gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> list[bool]:
    """Return which gradients need a copy in memory laid out as their parameter's."""
    seen = {storage_of(parameter) for parameter in parameters}
    found = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        whole = gradient.untyped_storage().nbytes()
        dense = whole == gradient.numel() * gradient.element_size()
        as_it_is = gradient.stride() == parameter.stride() and dense
        found.append(not as_it_is or storage_of(gradient) in seen)
        seen.add(storage_of(gradient))
    return found


@contextmanager
def own_gradients(
    tensors: Iterable[torch.Tensor],
) -> Iterator[dict[torch.Tensor, torch.Tensor | None]]:
    """Have tensors start without a gradient; put back what they had.

    Yields:
        What is put back, by tensor; more may be added.
    """
    before = {tensor: tensor.grad for tensor in tensors}
    for tensor in before:
        tensor.grad = None
    try:
        yield before
    finally:
        for tensor, gradient in before.items():
            tensor.grad = gradient
