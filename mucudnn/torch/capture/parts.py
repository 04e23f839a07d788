"""The tensors that a step is made of, and where they are found before each step.

Checkpoints, schedules and users replace tensors between steps. A plan holds none of
them: they are looked up where the model, the optimizer and the scaler have them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mucudnn.arguments import a_function, of_type
from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.optimizers import make_state
from mucudnn.torch.capture.settings import PLAIN, StepSettings

__all__ = [
    "LiveParts",
    "StepParts",
    "as_tensor",
    "check_parts",
    "places_of",
    "root_of",
]

_COMPILED = "torch.compile(model, backend=mt.backend(budget=...))"

_WRAPPERS = {
    "DataParallel": "take the module inside of it, on one device",
    "DistributedDataParallel": (
        f"DistributedDataParallel({_COMPILED}) keeps a budget on every rank, and "
        "mt.distribute divides batches among ranks; the module inside of it alone "
        "would train every rank by itself"
    ),
    "FullyShardedDataParallel": (
        f"shard the model with torch.distributed.fsdp.fully_shard; {_COMPILED} keeps a "
        "budget there"
    ),
    "FSDPModule": f"{_COMPILED} keeps a budget under fully_shard",
}
"""Classes of modules that spread a model, and what works in place of a step."""


def check_parts(model: Any, loss_fn: Any, optimizer: Any) -> None:
    """Refuse what a step cannot be made of.

    Raises:
        TypeError: Something is of another type.
        ValueError: The optimizer has no parameter of the model.
        UnsupportedError: The model is wrapped.
    """
    of_type("model", model, torch.nn.Module, "a torch.nn.Module")
    a_function("loss_fn", loss_fn, "a function of the model's result and of the batch")
    of_type("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    own = set(map(id, root_of(model, loss_fn).parameters()))
    if own.isdisjoint(id(p) for g in optimizer.param_groups for p in g["params"]):
        raise ValueError(
            "optimizer must have parameters of the model, or of a loss that is a "
            "module, and has none of them; make it with model.parameters(), after "
            "whatever replaces them"
        )


def root_of(
    model: torch.nn.Module, loss_fn: Callable[..., Any] | None = None
) -> torch.nn.Module:
    """One module with the model in it, and the loss where it is a module too.

    Raises:
        UnsupportedError: The model is wrapped by what spreads it over devices,
            compiled, or has tensors that are made of others.
    """
    for module in model.modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if found := [kind for kind in kinds if kind in _WRAPPERS]:
            raise UnsupportedError(
                f"the model has a {found[0]}, whose collectives are not captured; "
                f"{_WRAPPERS[found[0]]}"
            )
        if kinds[0] == "OptimizedModule":
            raise UnsupportedError(
                "the model is compiled by torch.compile; take the one that was given "
                "to it, or compile with backend='mucudnn' in place of this step"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"the model has a scripted module ({module.original_name}), whose "
                "operations cannot be seen; take the one that torch.jit was given"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_traceable_wrapper_subclass(tensor):
            raise UnsupportedError(
                f"{name} of the model is a {type(tensor).__name__}, a tensor that is "
                "made of others; a step takes plain ones"
            )
    root = torch.nn.Module()
    root.model = model
    if isinstance(loss_fn, torch.nn.Module):
        root.loss_fn = loss_fn
    return root


def places_of(
    root: torch.nn.Module, given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors by all names under which a module has them, tied ones by several.

    A module that is there several times has its tensors by one name.

    Args:
        root: The module.
        given: Other tensors, by the names that its own have among `named_parameters`
            and `named_buffers`.
    """
    own = (*root.named_parameters(), *root.named_buffers())
    first = {id(tensor): name for name, tensor in own}
    return {
        f"{prefix}.{name}": given[first[id(tensor)]]
        for prefix, module in root.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if id(tensor) in first
    }


@dataclass(frozen=True)
class StepParts:
    """The tensors of a step, in the order in which its graph takes them.

    Attributes:
        parameters: By name, shared ones once.
        buffers: By name, shared ones once.
        state: The optimizer's tensors, by group, parameter and key; none where the
            optimizer makes its update itself.
        scale: The scaler's factor and its count of steps since that has changed.
        rates: The learning rate of each group, a number or a tensor; zero where an
            optimizer has none.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    state: Mapping[tuple[int, int, str], torch.Tensor]
    scale: tuple[torch.Tensor, ...]
    rates: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any] | None = None,
        settings: StepSettings = PLAIN,
    ) -> "StepParts":
        """The parts as they are now; the optimizer's state is made if it is not there.

        Raises:
            UnsupportedError: The model is wrapped.
        """
        root = root_of(model, loss_fn)
        if settings.recorded:
            make_state(optimizer, set(map(id, root.parameters())))
        state = {
            (i, j, key): value
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
            for key, value in optimizer.state.get(parameter, {}).items()
            if settings.recorded and isinstance(value, torch.Tensor)
        }
        return cls(
            dict(root.named_parameters()),
            dict(root.named_buffers()),
            state,
            _scale(settings),
            tuple(group.get("lr", 0.0) for group in optimizer.param_groups),
        )

    def tensors(self) -> list[torch.Tensor]:
        """All of them, detached; a rate that is a number as a tensor of one."""
        groups = (self.parameters.values(), self.buffers.values(), self.state.values())
        held = [t.detach() for group in (*groups, self.scale) for t in group]
        return [*held, *map(as_tensor, self.rates)]

    def names(self) -> list[str]:
        """What each of the tensors is called."""
        return [
            *self.parameters,
            *self.buffers,
            *(f"state.{i}.{j}.{key}" for i, j, key in self.state),
            *(f"scale.{i}" for i in range(len(self.scale))),
            *(f"rate.{i}" for i in range(len(self.rates))),
        ]


def _scale(settings: StepSettings) -> tuple[torch.Tensor, ...]:
    scaler: Any = settings.scaler
    if not settings.scales:
        return ()
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return scaler._scale, scaler._growth_tracker


def as_tensor(rate: Any) -> torch.Tensor:
    """A learning rate as a step is given it."""
    if isinstance(rate, torch.Tensor):
        return rate
    return torch.tensor(rate, dtype=torch.float64)


class LiveParts:
    """The parts of a step wherever they are now.

    Args:
        model: Whose parameters and buffers they are.
        optimizer: Whose state.
        loss_fn: The loss, which has such too if it is a module.
        settings: With a scaler, if there is one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any],
        settings: StepSettings,
    ) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self.parts = StepParts.of(model, optimizer, loss_fn, settings)
        root = root_of(model, loss_fn)
        named = dict(root.named_modules())

        def place(name: str, kind: str) -> tuple[dict[str, Any], str]:
            module, _, own = name.rpartition(".")
            return getattr(named[module], kind), own

        self._parameters = [place(n, "_parameters") for n in self.parts.parameters]
        self._buffers = [place(n, "_buffers") for n in self.parts.buffers]
        self._modules = [
            (module, list(module._modules.values()))
            for module in root.modules()
            if module is not root
        ]
        self._counts = [
            (m._parameters, _there(m._parameters), m._buffers, _there(m._buffers))
            for m, _ in self._modules
        ]
        self._numbers: dict[int, float] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._given = [list(group["params"]) for group in optimizer.param_groups]
        self._trained = self._trained_now()

    def current(self) -> bool:
        """Whether these are still the parts: nothing was added, removed or replaced."""
        groups = self._optimizer.param_groups
        held = self.parts.parameters.values()
        return (
            len(groups) == len(self._given)
            and all(
                _identical(group["params"], params)
                for group, params in zip(groups, self._given, strict=True)
            )
            and all(
                _identical(module._modules.values(), children)
                for module, children in self._modules
            )
            and all(
                _there(parameters) == mine and _there(buffers) == names
                for parameters, mine, buffers, names in self._counts
            )
            and all(
                found.get(name) is parameter
                for (found, name), parameter in zip(self._parameters, held, strict=True)
            )
            and self._trained == self._trained_now()
            and self._has_state()
        )

    def _trained_now(self) -> list[bool]:
        """Which parameters are trained; what begins to be has its state made."""
        return [p.requires_grad for params in self._given for p in params]

    def _has_state(self) -> bool:
        """Whether the optimizer has all its state, and no other."""
        if not self._settings.recorded:
            return True
        state = self._optimizer.state
        count = sum(
            isinstance(value, torch.Tensor)
            for params in self._given
            for p in params
            for value in state.get(p, {}).values()
        )
        return count == len(self.parts.state) and all(
            isinstance(state.get(self._given[i][j], {}).get(key), torch.Tensor)
            for i, j, key in self.parts.state
        )

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of now, in the order of the parts."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        of_state = [state[self._given[i][j]][key] for i, j, key in self.parts.state]
        rates = list(map(self._rate, range(len(groups)), groups))
        found = [places[name] for places, name in (*self._parameters, *self._buffers)]
        return [*found, *of_state, *_scale(self._settings), *rates]

    def _rate(self, number: int, group: Mapping[str, Any]) -> torch.Tensor:
        """A group's learning rate, a number in a tensor that stays."""
        rate = group.get("lr", 0.0)
        if isinstance(rate, torch.Tensor):
            return rate
        if self._numbers.get(number) != rate:
            self._numbers[number] = rate
            self._held[number] = as_tensor(rate)
        return self._held[number]

    @cached_property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """All modules."""
        return tuple(module for module, _ in self._modules)


def _there(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Return the names that a module has a tensor by: others stand for none."""
    return [name for name, tensor in tensors.items() if tensor is not None]


def _identical(found: Any, known: list[Any]) -> bool:
    return len(found) == len(known) and all(
        a is b for a, b in zip(found, known, strict=True)
    )
