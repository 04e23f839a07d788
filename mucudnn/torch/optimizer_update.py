"""Optimizers that update parameters themselves: measured, planned and run.

Forward and backward are planned in what is left beside what the optimizer holds. The
update finds parameters, buffers, all gradients and what the step returns, and needs
what was measured: the budget has to hold both.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
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
from mucudnn.torch.plan import TorchPlan, UpdateBytes
from mucudnn.torch.source_lines import bytes_in_storages, storage_of

_BoundT = TypeVar("_BoundT")


_UPDATE = "the optimizer's update"


@dataclass(frozen=True)
class OwnUpdate:
    """What an optimizer does behind a planned forward and backward pass.

    Attributes:
        bytes: What it has in use.
        reason: Why it is not planned.
    """

    bytes: UpdateBytes
    reason: str

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        captured: CapturedStep,
        parameters: Mapping[str, torch.Tensor],
        reason: str,
        *,
        foreach: bool | None = None,
    ) -> "OwnUpdate | None":
        """What an optimizer does by itself; None if its update is captured.

        Args:
            optimizer: Stays as it is.
            captured: The step.
            parameters: The optimizer's, by name.
            reason: Why its update is not captured.
            foreach: As `measured_update` takes it.

        Raises:
            UnsupportedError: It cannot be told what that needs; says why.
        """
        if captured.gradients is None:
            return None
        trained = [id(parameters[name]) for name in captured.gradients if name]
        try:
            found = measured_update(optimizer, trained, foreach=foreach)
        except UnsupportedError as e:
            raise UnsupportedError(
                f"the optimizer's update cannot be planned: {reason}. Nor can it be "
                f"left to the optimizer: {e}. A model that is compiled, "
                "torch.compile(model, backend=mt.backend(budget=...)), keeps a budget "
                "of forward and backward with any optimizer"
            ) from e
        if found.closure and "" in captured.gradients:
            raise scaled_closure_error(optimizer)
        return cls(found, reason)

    def planned(
        self,
        captured: CapturedStep,
        parts: StepParts,
        budget: float,
        plan: Callable[[float], tuple[TorchPlan, _BoundT]],
    ) -> tuple[TorchPlan, _BoundT]:
        """The passes in what is left for them.

        Args:
            captured: The passes.
            parts: What the step is made of.
            budget: For both.
            plan: Plans the passes within so many bytes; and what runs them.

        Raises:
            PlanningError: They, or the update, do not fit; says what would do.
        """
        peak = self.peak_bytes(captured, parts)
        try:
            found, bound = plan(max(0.0, budget - self.bytes.held))
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            least = max(e.least_bytes + self.bytes.held, peak)
            raise self._refusal(budget, least, e.node) from None
        if peak > budget:
            raise self._refusal(budget, peak, None)
        told = replace(
            found,
            budget=budget,
            resident_bytes=found.resident_bytes + self.bytes.state,
            own_update=self.bytes,
            update_peak_bytes=peak,
            update_reason=self.reason,
        )
        return told, bound

    def peak_bytes(self, captured: CapturedStep, parts: StepParts) -> int:
        """The most that is in use during the update."""
        left = _returned(captured) + _apart(captured, parts)
        return _resident(parts) + left + self.bytes.most

    def behind(
        self, graph: Graph, profile: Profile, captured: CapturedStep, parts: StepParts
    ) -> tuple[Graph, Profile]:
        """The passes' graph and costs with the update as a last node.

        Its time is not known, and none.
        """
        state = TensorSpec(
            f"{_UPDATE}: state", (self.bytes.held,), "uint8", Role.BORROWED
        )
        node = Node(_UPDATE, "own_update", (state.name,), (), phase=Phase.UPDATE)
        scratch = self.bytes.most - self.bytes.held + _apart(captured, parts)
        tensors = MappingProxyType({**graph.tensors, state.name: state})
        return Graph(tensors, (*graph.nodes, node), graph.outputs), replace(
            profile,
            node_ms={**profile.node_ms, node.name: 0.0},
            workspaces={**profile.workspaces, node.name: scratch},
        )

    def _refusal(self, budget: float, least: int, node: str | None) -> PlanningError:
        return PlanningError(
            f"the step does not fit into {exact_bytes(int(budget))}: its optimizer "
            f"makes its update itself ({self.reason}), with all gradients and "
            f"{exact_bytes(self.bytes.most)} more; the least budget that works is "
            f"{exact_bytes(least)}",
            node=node,
            short_by=0 if math.isinf(budget) else least - int(budget),
            least_bytes=least,
        )


def _resident(parts: StepParts) -> int:
    """Bytes of parameters, buffers and rates."""
    return bytes_in_storages(parts.tensors())


def _results(captured: CapturedStep) -> list[torch.Tensor]:
    """What the passes return, but for what their inputs have become."""
    (output,) = captured.module.graph.find_nodes(op="output")
    values = [node.meta.get("val") for node in output.args[0]]
    return values[: len(values) - len(captured.names)]


def _returned(captured: CapturedStep) -> int:
    """Bytes of what the passes return."""
    return bytes_in_storages(
        [v for v in _results(captured) if isinstance(v, torch.Tensor)]
    )


def _apart(captured: CapturedStep, parts: StepParts) -> int:
    """Bytes of the copies that gradients need."""
    values = _results(captured)
    names = [name for name in captured.gradients or () if name]
    scaled = len(captured.gradients or ()) - len(names)
    gradients = values[len(values) - len(names) - scaled : len(values) - scaled]
    parameters = [parts.parameters[name] for name in names]
    copied = copies_needed(gradients, parameters)
    return sum(
        rounded(gradient.numel() * gradient.element_size())
        for gradient, needed in zip(gradients, copied, strict=True)
        if needed
    )


# What an optimizer has in use while it makes its update itself, measured on a copy.
#
# The copy has parameters, gradients and state of its own, on the CPU in memory that is
# not of PyTorch's allocator: what is counted is what an update adds. It makes a few
# updates, as the first one mostly makes the state. That an update which decides by
# values never needs more than those it made here is taken for granted. Gradients are
# made up, the same ones every time; so are parameters without data.


_UPDATES = 3

_SMALL = 1e-2
"""Of gradients that are made up."""


_MOST_OF_A_SEARCH = 4
"""Gradients that a line search holds beside those it returns."""


_HOOKS = "hooks"


def measured_update(
    optimizer: torch.optim.Optimizer,
    trained: Collection[int],
    *,
    foreach: bool | None = None,
) -> UpdateBytes:
    """Have a copy of an optimizer make a few updates.

    Args:
        optimizer: Stays as it is.
        trained: The parameters that have gradients, by `id`.
        foreach: What the copy's `foreach` is where the optimizer leaves that open;
            PyTorch takes kernels over many tensors on a GPU, which need more.

    Raises:
        UnsupportedError: It cannot be copied, its update fails, or it needs more with
            every one.
    """
    try:
        return _Measured(optimizer, trained, foreach, closure=False).bytes()
    except UnsupportedError:
        raise
    except Exception as first:  # of what kind is the optimizer's own affair
        try:
            return _Measured(optimizer, trained, foreach, closure=True).bytes()
        except UnsupportedError:
            raise
        except Exception:
            kind = type(optimizer).__name__
            raise UnsupportedError(
                f"{kind}.step() fails on a copy of it, with "
                f"{type(first).__name__}: {first}"
            ) from first


def check_room(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to measure an optimizer whose copy would not fit into this machine.

    The copy has parameters and gradients, and what it makes of them may be as large.

    Raises:
        UnsupportedError: Says how much there is.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    needed = 3 * sum(_nbytes(p) for p in parameters if p.is_cpu or p.is_meta)
    there = CpuDevice().available_bytes()
    if needed > there:
        raise UnsupportedError(
            f"{type(optimizer).__name__}'s update cannot be recorded, and what it "
            f"needs can only be measured by running it: about {exact_bytes(needed)} "
            f"for copies of its parameters and gradients, and this machine has "
            f"{exact_bytes(there)}; take a machine that has them, a smaller model, or "
            "an optimizer whose update can be recorded, such as AdamW"
        )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that an optimizer has beside its parameters."""
    groups = optimizer.param_groups
    own = {storage_of(p) for group in groups for p in group["params"]}
    return bytes_in_storages(t for t in _tensors(optimizer) if storage_of(t) not in own)


class _Measured:
    """A copy of an optimizer whose updates are measured.

    Args:
        optimizer: What it is a copy of.
        trained: The parameters that have gradients, by `id`.
        foreach: What the copy's is where it is left open.
        closure: Whether its steps are given one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Collection[int],
        foreach: bool | None,
        *,
        closure: bool,
    ) -> None:
        self._twin, copies = _copied(optimizer)
        for group in self._twin.param_groups:
            if "foreach" in group and group["foreach"] is None:
                group["foreach"] = foreach
        make_state(self._twin)
        self._trained = [copies[at] for at in trained if at in copies]
        self._closure = closure
        self._random = torch.Generator(self._trained[0].device).manual_seed(0)
        self._meter = meter_of(self._trained[0].device)
        self._before = state_bytes(self._twin)

    def bytes(self) -> UpdateBytes:
        """What was seen over a few updates."""
        state, most, held = self._before, 0, 0
        states = [state]
        for _ in range(_UPDATES):
            peak = self._most(0)
            most = max(most, states[-1] + peak)
            states.append(state_bytes(self._twin))
        held = states[-1]
        if self._closure:
            block = most + (1 << 20)
            held = max(held, states[-1] + self._most(block) - block)
        more = _still_to_come(self._twin)
        if states[-1] > states[-2] and not more:
            raise UnsupportedError(
                f"{type(self._twin).__name__} has {exact_bytes(states[-1])} of state "
                f"after {_UPDATES} steps and had {exact_bytes(states[-2])} one before: "
                "no budget can be promised while it grows with every step"
            )
        gradients = sum(map(_nbytes, self._trained)) if self._closure else 0
        return UpdateBytes(
            rounded(states[-1] + more),
            rounded(held + more),
            rounded(max(most + more - gradients, held + more)),
            self._closure,
        )

    def _most(self, block: int) -> int:
        """The most that one update has in use of what it allocates.

        Args:
            block: Bytes that its closure takes while there are no gradients.
        """
        return self._meter.most_bytes([lambda: self._prepared(block)])[0]

    def _prepared(self, block: int) -> Callable[[], object]:
        if not self._closure:
            for parameter in self._trained:
                parameter.grad = self._drawn(_own_updates_apart(parameter.detach()))
            return lambda: self._twin.step()

        def closure() -> torch.Tensor:
            """A loss, and gradients, that a search finds no minimum of."""
            for parameter in self._trained:
                parameter.grad = None
            taken = torch.empty(block, dtype=torch.uint8)
            del taken
            for parameter in self._trained:
                parameter.grad = self._drawn(torch.empty_like(parameter.detach()))
            return torch.rand((), generator=self._random, device=self._random.device)

        for parameter in self._trained:
            parameter.grad = None
        return lambda: self._twin.step(closure)

    def _drawn(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.normal_(0, _SMALL, generator=self._random)


def _still_to_come(optimizer: torch.optim.Optimizer) -> int:
    """What the history of L-BFGS grows by, and what a line search may hold."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 0
    group = optimizer.param_groups[0]
    state = optimizer.state[group["params"][0]]
    size = int(group["history_size"])
    missing = 2 * (size - len(state.get("old_dirs") or ()))
    missing += _MOST_OF_A_SEARCH if group["line_search_fn"] else 0
    flat = rounded(sum(map(_nbytes, group["params"])))
    return missing * flat + 2 * size * rounded(1)


def _copied(
    optimizer: torch.optim.Optimizer,
) -> tuple[torch.optim.Optimizer, dict[int, torch.Tensor]]:
    """A copy without hooks, and its parameters by the `id` of the others.

    PyTorch's own way to copy one would leave a subclass's attributes behind.

    Raises:
        UnsupportedError: It cannot be copied.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [*parameters, *_tensors(optimizer)]
    copies = {id(tensor): _own_updates_apart(tensor) for tensor in tensors}
    memo: dict[int, Any] = {id(optimizer): twin, **copies}
    rest = {
        key: OrderedDict() if key.endswith(_HOOKS) else value
        for key, value in vars(optimizer).items()
        if key != "step"  # a schedule's, which is bound to the other
    }
    try:
        vars(twin).update(copy.deepcopy(rest, memo))
    except (TypeError, RuntimeError) as e:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be copied, so that nobody knows what "
            f"its update needs: {e}"
        ) from e
    return twin, {id(p): copies[id(p)] for p in parameters}


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All tensors in its state and its attributes."""
    held = {k: v for k, v in vars(optimizer).items() if k != "state"}
    for leaf in pytree.tree_leaves([held, list(optimizer.state.values())]):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _own_updates_apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose memory is, on the CPU, not of PyTorch's allocator."""
    value = tensor.detach()
    if value.is_cpu or value.is_meta:
        count = 1 + sum(
            (size - 1) * step
            for size, step in zip(value.shape, value.stride(), strict=True)
        )
        nbytes = count * value.element_size() if value.numel() else 0
        storage = host_bytes(nbytes).untyped_storage()
        made = torch.empty(0, dtype=value.dtype).set_(
            storage, 0, value.shape, value.stride()
        )
    else:
        made = torch.empty_like(value)
    if not value.is_meta:
        made.copy_(value)
    elif made.is_floating_point():
        made.normal_(0, _SMALL, generator=torch.Generator().manual_seed(0))
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


# An optimizer's own step behind a planned forward and backward pass.
#
# It finds gradients where it looks for them, in memory of their own, and they are gone
# when it is done: what a parameter's `grad` was before is there again.


def own_update(
    optimizer: torch.optim.Optimizer,
    passes: Callable[[], list[Any]],
    parameters: Sequence[torch.Tensor],
    *,
    begin: Callable[[], None],
    closure: bool,
    scaled: bool,
) -> list[Any]:
    """One step; what its first forward pass returned but for gradients.

    Args:
        optimizer: Makes the update.
        passes: Runs forward and backward: what is returned, behind it a gradient for
            each parameter and, with a scaler, whether some is not finite.
        parameters: Those that have a gradient.
        begin: Called before the first parameter is written, and more often.
        closure: Whether the optimizer runs the passes.
        scaled: Whether there is a scaler, so that steps may be skipped.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with own_gradients(held) as before:
        if not closure:
            results = passes()
            skipped = scaled and bool(results.pop())
            _give(parameters, _taken(results, len(parameters)))
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
            _give(parameters, _taken(results, len(parameters)))
            if not first:
                first.append(results)
            begin()  # from here on the optimizer may write
            return results[0]

        optimizer.step(again)
        return first[0]


def scaled_closure_error(optimizer: torch.optim.Optimizer) -> UnsupportedError:
    """Return the error of steps with a scaler whose optimizer needs a closure."""
    return UnsupportedError(
        f"{type(optimizer).__name__} takes a closure, and a step with a scaler gives "
        "it none; train without scaler=..., in bfloat16 for example"
    )


def copies_needed(
    gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> list[bool]:
    """Which gradients have no memory of their own that is as their parameter's."""
    seen = {storage_of(parameter) for parameter in parameters}
    found = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        whole = gradient.untyped_storage().nbytes()
        dense = whole == gradient.numel() * gradient.element_size()
        as_it_is = gradient.stride() == parameter.stride() and dense
        found.append(not as_it_is or storage_of(gradient) in seen)
        seen.add(storage_of(gradient))
    return found


def _taken(results: list[Any], count: int) -> list[Any]:
    """The last of a list, which it is left without."""
    start = len(results) - count
    last = results[start:]
    del results[start:]
    return last


def _give(parameters: Sequence[torch.Tensor], gradients: Sequence[Any]) -> None:
    """Store gradients as autograd does."""
    copied = copies_needed(gradients, parameters)
    rows = zip(parameters, gradients, copied, strict=True)
    for parameter, gradient, apart in rows:
        parameter.grad = (
            torch.empty_like(parameter.detach()).copy_(gradient) if apart else gradient
        )


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
