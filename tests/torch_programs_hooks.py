"""Programs with hooks of every kind: there from the start, added, removed, changing."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    factor: Callable[[], float]

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


def fixed() -> float:
    return 0.5


def present(register: Callable[[Hooked], Any]) -> Training:
    model = perceptron()
    optimizer = sgd(model)
    register(Hooked(model, optimizer, fixed))
    return trained(model, optimizer=optimizer)


def added(register: Callable[[Hooked], Any]) -> Training:
    model = perceptron()
    optimizer = sgd(model)
    hooked = Hooked(model, optimizer, fixed)
    return trained(model, optimizer=optimizer, change=lambda: register(hooked))


def removed(register: Callable[[Hooked], Any]) -> Training:
    model = perceptron()
    optimizer = sgd(model)
    handle = register(Hooked(model, optimizer, fixed))
    return trained(model, optimizer=optimizer, change=handle.remove)


def reading_a_list(register: Callable[[Hooked], Any]) -> Training:
    model = perceptron()
    optimizer = sgd(model)
    factors = [0.5]
    register(Hooked(model, optimizer, lambda: factors[0]))
    change = functools.partial(factors.__setitem__, 0, 2.0)
    return trained(model, optimizer=optimizer, change=change)


def counting(register: Callable[[Hooked], Any]) -> Training:
    model = perceptron()
    optimizer = sgd(model)
    count = [0]

    def factor() -> float:
        count[0] += 1
        return 1.0 / count[0]

    register(Hooked(model, optimizer, factor))
    return trained(model, optimizer=optimizer, watched=lambda: count[0])


OFTEN = (
    "forward",
    "forward_pre",
    "full_backward",
    "full_backward_pre",
    "of_a_parameter",
    "post_accumulate",
    "optimizer_pre",
    "optimizer_post",
    "every_forward",
)

for kind, hook in KINDS.items():
    for when in (present, added, removed, reading_a_list, counting):
        if kind in OFTEN or when in (added, reading_a_list):
            PROGRAMS(
                functools.partial(when, hook),
                name=f"{kind}_hook_{when.__name__}",
                changes_in_step=when is counting,
                is_planned=kind == "of_a_parameter" and when is present,
            )


# --- hooks that change nothing, or something else


def idle(name: str, register: Callable[[Any, Any], Any]) -> None:
    """Add a program with a hook, added in training, that no step calls."""

    def build() -> Training:
        model = perceptron()
        optimizer = sgd(model)
        return trained(
            model, optimizer=optimizer, change=lambda: register(model, optimizer)
        )

    PROGRAMS(build, name=name)


def pass_by(*_: Any, **__: Any) -> None:
    pass


idle("state_dict_hook", lambda m, o: m.register_state_dict_post_hook(pass_by))
idle("load_hook", lambda m, o: m.register_load_state_dict_pre_hook(pass_by))
idle("optimizer_state_dict_hook", lambda m, o: o.register_state_dict_pre_hook(pass_by))
idle(
    "parameter_registration_hook",
    lambda m, o: of_modules.register_module_parameter_registration_hook(pass_by),
)
idle(
    "buffer_registration_hook",
    lambda m, o: of_modules.register_module_buffer_registration_hook(pass_by),
)


@PROGRAMS
def hooks_change_their_order() -> Training:
    model = perceptron()
    model[0].register_forward_hook(lambda module, inputs, out: out + 1)
    doubled = lambda module, inputs, out: out * 2  # noqa: E731
    handle = model[0].register_forward_hook(doubled)

    def change() -> None:
        handle.remove()
        model[0].register_forward_hook(doubled, prepend=True)

    return trained(model, change=change)


@PROGRAMS
def hook_replaced_by_another() -> Training:
    model = perceptron()
    handle = model[0].register_forward_hook(lambda module, inputs, out: out * 2)

    def change() -> None:
        handle.remove()
        model[0].register_forward_hook(lambda module, inputs, out: out * 3)

    return trained(model, change=change)


@PROGRAMS(changes_in_step=True)
def hook_removes_itself() -> Training:
    model = perceptron()

    def once(module, inputs, out):
        handle.remove()
        return out * 3

    handle = model[0].register_forward_hook(once)
    return trained(model)


@PROGRAMS(changes_in_step=True)
def hook_collects_features() -> Training:
    model = perceptron()
    features: list[Any] = []
    model[0].register_forward_hook(
        lambda module, inputs, out: features.append(out.detach())
    )
    return trained(model, watched=lambda: list(features))


@PROGRAMS(changes_in_step=True)
def hook_collects_gradients() -> Training:
    model = perceptron()
    gradients: list[Any] = []
    model[0].weight.register_hook(lambda g: gradients.append(g.clone()))
    return trained(model, watched=lambda: list(gradients))


@PROGRAMS
def hook_keeps_features_for_the_loss() -> Training:
    model = perceptron()
    kept = {}
    model[0].register_forward_hook(lambda module, inputs, out: kept.update(hidden=out))

    def loss(out, y):
        return nn.functional.cross_entropy(out, y) + kept["hidden"].square().mean()

    return trained(model, loss_fn=loss)


@PROGRAMS
def hook_object_changes() -> Training:
    class Scaling:
        factor = 1.0

        def __call__(self, module, inputs, out):
            return out * self.factor

    model = perceptron()
    hook = Scaling()
    model[0].register_forward_hook(hook)
    return trained(model, change=lambda: setattr(hook, "factor", 3.0))


@PROGRAMS
def hook_is_a_method_of_a_replaced_object() -> Training:
    class Scaling(nn.Module):
        factor = 1.0

        def scale(self, module, inputs, out):
            return out * self.factor

    model = perceptron()
    hook = Scaling()
    model[0].register_forward_hook(hook.scale)
    return trained(model, change=lambda: setattr(hook, "factor", 3.0))


@PROGRAMS
def hook_of_a_result_reads_a_list() -> Training:
    factors = [1.0]

    def read(s, out):
        out.register_hook(lambda gradient: gradient * factors[0])
        return out

    return trained(Reading(read), change=lambda: factors.__setitem__(0, 3.0))


@PROGRAMS
def hook_of_a_node_reads_a_list() -> Training:
    factors = [1.0]

    def read(s, out):
        out = out * 2
        out.grad_fn.register_hook(
            lambda inputs, outputs: tuple(
                None if g is None else g * factors[0] for g in inputs
            )
        )
        return out

    return trained(Reading(read), change=lambda: factors.__setitem__(0, 3.0))


@PROGRAMS
def autograd_function_reads_a_list() -> Training:
    factors = [1.0]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factors[0]

    model = Reading(lambda s, out: Scaled.apply(out))
    return trained(model, change=lambda: factors.__setitem__(0, 3.0))


@PROGRAMS
def saved_tensors_are_packed() -> Training:
    def read(s, out):
        pack, unpack = (lambda t: t * 1.0), (lambda t: t * s.factor)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return out.exp()

    model = Reading(read, factor=1.0)
    return trained(model, change=lambda: setattr(model, "factor", 0.5))


@PROGRAMS
def hook_of_a_frozen_parameter_that_is_thawed() -> Training:
    model = perceptron()
    weight = model[0].weight
    weight.register_hook(lambda gradient: gradient * 3)
    weight.requires_grad_(False)
    return trained(model, change=lambda: weight.requires_grad_(True))


@PROGRAMS(is_planned=True)
def optimizer_hook_clips_gradients() -> Training:
    model = perceptron()
    optimizer = sgd(model)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    change = functools.partial(optimizer.register_step_pre_hook, clip)
    return trained(model, optimizer=optimizer, change=change)


@PROGRAMS
def optimizer_hook_clips_weights() -> Training:
    model = perceptron()
    optimizer = sgd(model)

    def clip(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)

    change = functools.partial(optimizer.register_step_post_hook, clip)
    return trained(model, optimizer=optimizer, change=change)
