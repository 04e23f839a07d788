"""Programs with hooks of every kind: there from the start, added, removed, changing."""

# ruff: noqa: F401  (rows of tables use what is imported)

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers

from tests.torch_programs import Programs, Reading, Training, perceptron, sgd, trained

PROGRAMS = Programs()


@dataclass
class Hooked:
    """What hooks are registered on, and the factor that they multiply by."""

    model: Any
    optimizer: torch.optim.Optimizer
    factor: Callable[[], float] = lambda: 0.5

    def scaled(self, gradients: Any) -> Any:
        return tuple(None if g is None else g * self.factor() for g in gradients)

    def scale_gradients(self, *_: Any) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor())

    def scale_gradient(self, parameter: Any) -> None:
        parameter.grad.mul_(self.factor())

    def scale_weights(self, *_: Any) -> None:
        with torch.no_grad():
            self.model[0].weight.mul_(self.factor())


KINDS: dict[str, Callable[[Hooked], Any]] = {
    "forward": lambda h: h.model[0].register_forward_hook(
        lambda module, inputs, out: out * h.factor()
    ),
    "forward_with_keywords": lambda h: h.model[0].register_forward_hook(
        lambda module, inputs, keywords, out: out * h.factor(), with_kwargs=True
    ),
    "forward_always": lambda h: h.model[0].register_forward_hook(
        lambda module, inputs, out: out * h.factor(), always_call=True
    ),
    "forward_pre": lambda h: h.model[0].register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * h.factor(),)
    ),
    "full_backward": lambda h: h.model[2].register_full_backward_hook(
        lambda module, inputs, outputs: h.scaled(inputs)
    ),
    "full_backward_pre": lambda h: h.model[2].register_full_backward_pre_hook(
        lambda module, outputs: h.scaled(outputs)
    ),
    "of_a_parameter": lambda h: h.model[0].weight.register_hook(
        lambda gradient: gradient * h.factor()
    ),
    "post_accumulate": lambda h: h.model[0].weight.register_post_accumulate_grad_hook(
        h.scale_gradient
    ),
    "optimizer_pre": lambda h: h.optimizer.register_step_pre_hook(h.scale_gradients),
    "optimizer_post": lambda h: h.optimizer.register_step_post_hook(h.scale_weights),
    "every_forward": lambda h: of_modules.register_module_forward_hook(
        lambda module, inputs, out: (
            out * h.factor() if isinstance(module, nn.Linear) else None
        )
    ),
    "every_forward_pre": lambda h: of_modules.register_module_forward_pre_hook(
        lambda module, inputs: (
            (inputs[0] * h.factor(),) if isinstance(module, nn.Linear) else None
        )
    ),
    "every_full_backward": lambda h: of_modules.register_module_full_backward_hook(
        lambda module, inputs, outputs: (
            h.scaled(inputs) if module is h.model[2] else None
        )
    ),
    "every_optimizer_pre": lambda h: of_optimizers.register_optimizer_step_pre_hook(
        h.scale_gradients
    ),
    "every_optimizer_post": lambda h: of_optimizers.register_optimizer_step_post_hook(
        h.scale_weights
    ),
    "gradients_of_several": lambda h: torch.autograd.graph.register_multi_grad_hook(
        list(h.model.parameters()), h.scale_gradients
    ),
}


def present(hooked: Hooked, register: Callable[[Hooked], Any]) -> dict[str, Any]:
    register(hooked)
    return {}


def added(hooked: Hooked, register: Callable[[Hooked], Any]) -> dict[str, Any]:
    return {"change": lambda: register(hooked)}


def removed(hooked: Hooked, register: Callable[[Hooked], Any]) -> dict[str, Any]:
    return {"change": register(hooked).remove}


def reading_a_list(hooked: Hooked, register: Callable[[Hooked], Any]) -> dict[str, Any]:
    factors = [0.5]
    hooked.factor = lambda: factors[0]
    register(hooked)
    return {"change": functools.partial(factors.__setitem__, 0, 2.0)}


def counting(hooked: Hooked, register: Callable[[Hooked], Any]) -> dict[str, Any]:
    count = [0]

    def factor() -> float:
        count[0] += 1
        return 1.0 / count[0]

    hooked.factor = factor
    register(hooked)
    return {"watched": lambda: count[0]}


def hooked_training(when: Callable[..., Any], register: Callable[..., Any]) -> Training:
    model = perceptron()
    optimizer = sgd(model)
    others = when(Hooked(model, optimizer), register)
    return trained(model, optimizer=optimizer, **others)


OFTEN = (
    *("forward", "forward_pre", "full_backward", "full_backward_pre"),
    *("of_a_parameter", "post_accumulate", "optimizer_pre", "optimizer_post"),
    "every_forward",
)

for kind, hook in KINDS.items():
    for when in (present, added, removed, reading_a_list, counting):
        if kind in OFTEN or when in (added, reading_a_list):
            PROGRAMS(
                functools.partial(hooked_training, when, hook),
                name=f"{kind}_hook_{when.__name__}",
                changes_in_step=when is counting,
                is_planned=kind == "of_a_parameter" and when is present,
            )


# --- hooks that change nothing, or something else


def pass_by(*_: Any, **__: Any) -> None:
    pass


def collect(held: list[Any]) -> Callable[..., Any]:
    return lambda module, inputs, out: held.append(out.detach())


def remember(held: dict[str, Any]) -> Callable[..., Any]:
    return lambda module, inputs, out: held.update(hidden=out)


def once(handles: list[Any]) -> Callable[..., Any]:
    """Return a hook that removes itself."""

    def hook(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        handles[0].remove()
        return out * 3

    return hook


def clipping_gradients(model: Any) -> Callable[..., None]:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return clip


@torch.no_grad()
def clip_weights(model: Any, *_: Any) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def clipping_weights(model: Any) -> Callable[..., None]:
    return functools.partial(clip_weights, model)


def multiply(number: float) -> Callable[..., Any]:
    return lambda module, inputs, out: out * number


class Scaling:
    factor = 1.0

    def __call__(self, module, inputs, out):
        return out * self.factor


class ScalingModule(nn.Module):
    factor = 1.0

    def scale(self, module, inputs, out):
        return out * self.factor


PERCEPTRON = """
def build():
    m = perceptron()
    o = sgd(m)
    {made}
    def change():
        {change}
    def watched():
        {watched}
    return trained(m, optimizer=o, change=change, watched=watched)
"""
"""Of a model and its optimizer: what is done at first, a change, what is watched."""

PROGRAMS.table(globals(), PERCEPTRON, "made change watched")("""
state_dict_hook | | m.register_state_dict_post_hook(pass_by)
load_hook | | m.register_load_state_dict_pre_hook(pass_by)
optimizer_state_dict_hook | | o.register_state_dict_pre_hook(pass_by)
parameter_registration_hook
    | | of_modules.register_module_parameter_registration_hook(pass_by)
buffer_registration_hook
    | | of_modules.register_module_buffer_registration_hook(pass_by)
hooks_change_their_order
    | m[0].register_forward_hook(lambda module, inputs, out: out + 1)
    ; handle = m[0].register_forward_hook(multiply(2))
    | handle.remove(); m[0].register_forward_hook(multiply(2), prepend=True)
hook_replaced_by_another
    | handle = m[0].register_forward_hook(multiply(2))
    | handle.remove(); m[0].register_forward_hook(multiply(3))
hook_removes_itself
    | handles = []; handles.append(m[0].register_forward_hook(once(handles)))
    | | | changes_in_step
hook_collects_features
    | held = []; m[0].register_forward_hook(collect(held)) | | list(held)
    | changes_in_step
hook_collects_gradients
    | held = []; m[0].weight.register_hook(lambda g: held.append(g.clone()))
    | | list(held) | changes_in_step
hook_object_changes
    | hook = Scaling(); m[0].register_forward_hook(hook) | hook.factor = 3.0
hook_is_a_method_of_a_replaced_object
    | hook = ScalingModule(); m[0].register_forward_hook(hook.scale)
    | hook.factor = 3.0
hook_of_a_frozen_parameter_that_is_thawed
    | weight = m[0].weight; weight.register_hook(lambda gradient: gradient * 3)
    ; weight.requires_grad_(False) | weight.requires_grad_(True)
optimizer_hook_clips_gradients
    | | o.register_step_pre_hook(clipping_gradients(m)) | | is_planned
optimizer_hook_clips_weights | | o.register_step_post_hook(clipping_weights(m))
""")


@PROGRAMS
def hook_keeps_features_for_the_loss() -> Training:
    model, kept = perceptron(), {}
    model[0].register_forward_hook(remember(kept))

    def loss(out, y):
        return nn.functional.cross_entropy(out, y) + kept["hidden"].square().mean()

    return trained(model, loss_fn=loss)


# --- hooks of tensors and of nodes


def scaled(gradients: Any, factor: float) -> tuple[Any, ...]:
    return tuple(None if g is None else g * factor for g in gradients)


class Scaled(torch.autograd.Function):
    """Its gradient is scaled by a number in a list."""

    factors: ClassVar[list[float]] = [1.0]

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Scaled.factors[0]


def saved(s: Any, out: torch.Tensor) -> torch.Tensor:
    pack, unpack = (lambda t: t * 1.0), (lambda t: t * s.factors[0])
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return out.exp()


READS = """
def build():
    factors = [1.0]
    Scaled.factors[0] = 1.0
    def read(s, out):
        {result}
    m = Reading(read, factors=factors)
    def change():
        {change}
    return trained(m, change=change)
"""

PROGRAMS.table(globals(), READS, "result change")("""
hook_of_a_result_reads_a_list
    | out.register_hook(lambda gradient: gradient * factors[0]); out | factors[0] = 3.0
hook_of_a_node_reads_a_list
    | out = out * 2
    ; out.grad_fn.register_hook(lambda inputs, _: scaled(inputs, factors[0])); out
    | factors[0] = 3.0
autograd_function_reads_a_list | Scaled.apply(out) | Scaled.factors[0] = 3.0
saved_tensors_are_packed | saved(s, out) | factors[0] = 0.5
""")
