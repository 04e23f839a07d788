"""Programs of training practice: schedules, freezing, adapters, averages."""

# ruff: noqa: F401  (rows of tables use what is imported)

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils import checkpoint

from tests.torch_own_updates import CountingInState
from tests.torch_programs import (
    MODULES,
    Programs,
    Reading,
    Training,
    convolutional,
    images,
    perceptron,
    sgd,
    trained,
    vectors,
)

PROGRAMS = Programs()


# --- schedules


def scheduled(
    name: str, make: Callable[[Any], Any], *, keeps_plan: bool = True, steps: int = 4
) -> None:
    """Add a program with a scheduler of learning rates, stepped after each step."""

    def build() -> Training:
        model = perceptron()
        optimizer = sgd(model)
        scheduler = make(optimizer)

        def after(number: int, loss: torch.Tensor) -> None:
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*((loss.item() + number,) if plateau else ()))

        return trained(
            model,
            optimizer=optimizer,
            after=after,
            steps=steps,
            watched=lambda: [group["lr"] for group in optimizer.param_groups],
        )

    PROGRAMS(build, name=f"scheduled_by_{name}", keeps_plan=keeps_plan)


scheduled("steps", lambda o: lr_scheduler.StepLR(o, 2))
scheduled("several_steps", lambda o: lr_scheduler.MultiStepLR(o, [1, 3]))
scheduled("exponential", lambda o: lr_scheduler.ExponentialLR(o, 0.5))
scheduled("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, 4))
scheduled("warm_restarts", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2))
scheduled("function", lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.5**n))
scheduled("factor", lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.5))
scheduled("polynomial", lambda o: lr_scheduler.PolynomialLR(o, 4))
scheduled("linear", lambda o: lr_scheduler.LinearLR(o))
scheduled("constant", lambda o: lr_scheduler.ConstantLR(o, 0.5, 2))
scheduled("plateau", lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0))
scheduled("average", lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=2))
scheduled(
    "one_cycle",
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
    keeps_plan=False,
)
scheduled(
    "cycles",
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    keeps_plan=False,
)
scheduled(
    "sequence",
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
)
scheduled(
    "chain",
    lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
)


# --- optimizers


MODELS = """
def build():
    m = {model}
    o = {optimizer}
    (g,) = o.param_groups
    def change():
        {change}
    return trained(m, optimizer=o, change=change)
"""
"""Of a model and its optimizer, and what is changed: the optimizer has one group."""

optimizers = PROGRAMS.table(
    globals(), MODELS.replace("{model}", "perceptron()"), "optimizer change"
)


def adam(model: nn.Module, **others: Any) -> Any:
    return optim.Adam(model.parameters(), 0.01, **others)


def adamw(model: nn.Module, rate: Any = 0.03) -> Any:
    return optim.AdamW(model.parameters(), rate)


optimizers("""
rate_set | sgd(m) | g["lr"] = 0.03 | keeps_plan
rate_becomes_a_tensor | sgd(m) | g["lr"] = torch.tensor(0.03)
rate_becomes_a_number_of_numpys | adamw(m) | g["lr"] = np.float32(0.03)
rate_is_a_number_of_numpys | adamw(m, np.float16(0.03)) | pass
rate_in_double_precision | adamw(m, np.float64(0.03)) | pass | is_planned
differentiable | optim.SGD(m.parameters(), 0.1, differentiable=True) | pass
rate_tensor_in_place
    | optim.SGD(m.parameters(), torch.tensor(0.1)) | g["lr"].mul_(0.5) | keeps_plan
rate_is_zero | sgd(m) | g["lr"] = 0.0 | keeps_plan
weight_decay_set | sgd(m) | g["weight_decay"] = 0.3 | is_planned
momentum_set | sgd(m) | g["momentum"] = 0.5
momentum_to_zero | sgd(m) | g["momentum"] = 0.0
momentum_from_zero | optim.SGD(m.parameters(), 0.1) | g["momentum"] = 0.9
dampening_set | sgd(m) | g["dampening"] = 0.5
nesterov_set | sgd(m) | g["nesterov"] = True
maximize_set | sgd(m) | g["maximize"] = True
betas_set | adam(m) | g["betas"] = (0.5, 0.6)
eps_set | adam(m) | g["eps"] = 0.1
amsgrad_set | adam(m, amsgrad=True) | g["amsgrad"] = True
decoupled_set | adam(m) | g.update(decoupled_weight_decay=True, weight_decay=0.1)
foreach_set | adam(m) | g["foreach"] = True
state_cleared | sgd(m) | o.state.clear() | is_planned
state_cleared_of_adam | adam(m) | o.state.clear()
state_of_one_parameter_dropped | adam(m) | o.state.pop(g["params"][0])
state_zeroed | sgd(m) | [s["momentum_buffer"].zero_() for s in o.state.values()]
state_loaded | adam(m) | o.load_state_dict(copy.deepcopy(o.state_dict())) | is_planned
step_counter_set | adam(m) | [s["step"].fill_(100) for s in o.state.values()]
gradients_zeroed_between | sgd(m) | o.zero_grad(set_to_none=False)
parameter_dropped_from_the_group | sgd(m) | g["params"].pop()
parameters_in_another_order | sgd(m) | g["params"].reverse()
step_replaced
    | sgd(m)
    | step = o.step; o.step = lambda *a: (step(*a), m[0].weight.data.mul_(0.5))
""")


class Own(optim.Optimizer):
    """Scales its update by an attribute, by a group's number and by a state's."""

    def __init__(self, parameters, counts=False):
        super().__init__(parameters, {"lr": 0.1, "scale": 1.0})
        self.factor = 1.0
        self.counts = counts

    @torch.no_grad()
    def step(self):
        if self.counts:
            self.factor *= 0.5
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * group["scale"] * self.factor))


class Typed(Own):
    def step(self):
        for _ in range(1 if type(self.param_groups[0]["lr"]) is float else 2):
            super().step()


optimizers("""
own_optimizer_asks_for_a_type | Typed(m.parameters()) | | is_planned
own_optimizers_attribute | Own(m.parameters()) | o.factor = 3.0
own_optimizers_number | Own(m.parameters()) | g["scale"] = 3.0
own_optimizers_class
    | Own(m.parameters())
    | o.__class__ = type("Still", (Own,), {"step": lambda self: None})
own_optimizer_counts | Own(m.parameters(), counts=True) | | changes_in_step
""")


@PROGRAMS
def gradients_are_there_before() -> Training:
    model = perceptron()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return trained(model)


@PROGRAMS(is_planned=True)
def own_update_of_a_scheduled_and_clipped_step() -> Training:
    """With the model's output beside the loss."""
    model = perceptron()
    optimizer = optim.Adafactor(model.parameters(), 0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    return trained(
        model,
        optimizer=optimizer,
        loss_fn=lambda out, y: (functional.cross_entropy(out, y), out),
        after=lambda number, loss: scheduler.step(),
        options={"clip_norm": 0.1},
    )


@PROGRAMS(is_planned=True)
def own_update_changes_gradients_that_share_memory() -> Training:
    class Halving(CountingInState):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(0.5)
            super().step()

    one, other = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    model = Reading(lambda s, out: out + (s.one + s.other), one=one, other=other)
    return trained(model, optimizer=Halving([one, other]))


# --- parameters: frozen, replaced, loaded, moved


models = PROGRAMS.table(
    globals(), MODELS.replace("{optimizer}", "sgd(m)"), "model change"
)


def frozen() -> nn.Module:
    model = perceptron()
    model[0].requires_grad_(False)
    return model


def weights_clamped(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def weights_moved(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 0.5


def loaded(model: Any) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def loaded_by_assignment(model: Any) -> None:
    state = {k: v * 0.5 for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 4))


def leaking() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 4))


class LowRank(nn.Module):
    """A frozen layer and two small ones beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        self.scale, self.merged = 0.5, False

    def forward(self, x):
        out = self.layer(x)
        return out if self.merged else out + self.scale * self.up(self.down(x))


def adapted() -> nn.Module:
    model = perceptron()
    model[0] = LowRank(model[0])
    return model


def merged(model: Any) -> None:
    adapter = model[0]
    with torch.no_grad():
        adapter.layer.weight += adapter.scale * adapter.up.weight @ adapter.down.weight
    adapter.merged = True


def normed(norm: Callable[..., Any], **others: Any) -> nn.Module:
    model = perceptron()
    norm(model[0], **others)
    return model


class Doubled(nn.Module):
    factor = 1.0

    def forward(self, weight):
        return weight * self.factor


def parametrized() -> nn.Module:
    model = perceptron()
    parametrize.register_parametrization(model[0], "weight", Doubled())
    return model


class Negated(nn.ReLU):
    def forward(self, x):
        return -x


models("""
class_assigned | perceptron() | m[1].__class__ = Negated
forward_replaced_on_the_instance
    | perceptron() | m.forward = lambda x: m[2](m[0](x))
method_of_a_layer_replaced | perceptron() | m[1].forward = torch.tanh
seeded_between | dropping() | torch.manual_seed(7)
layer_frozen | perceptron() | m[0].requires_grad_(False) | is_planned
layer_thawed | frozen() | m[0].requires_grad_(True) | is_planned
bias_frozen | perceptron() | m[0].bias.requires_grad_(False)
everything_frozen | perceptron() | m.requires_grad_(False)
layer_replaced_without_parameters | perceptron() | m[1] = nn.Tanh()
layer_replaced | perceptron() | m[2] = nn.Linear(8, 4) | is_planned
parameter_replaced
    | perceptron() | m[0].bias = nn.Parameter(torch.ones(8)) | is_planned
bias_removed | perceptron() | m[2].register_parameter("bias", None) | is_planned
layer_appended | perceptron() | m.append(nn.Tanh())
layer_with_parameters_appended | perceptron() | m.append(nn.Linear(4, 4))
layer_grows_with_its_group
    | perceptron() | m.append(nn.Linear(4, 4))
    ; o.add_param_group({"params": m[3].parameters()})
layer_deleted | perceptron() | del m[1]
weights_clamped | perceptron() | weights_clamped(m) | keeps_plan
weights_in_other_memory | perceptron() | weights_moved(m)
weights_drawn_anew | perceptron() | m[0].reset_parameters() | keeps_plan
state_dict_loaded | perceptron() | loaded(m) | keeps_plan
state_dict_assigned | perceptron() | loaded_by_assignment(m) | is_planned
model_in_double | perceptron() | m.double()
model_in_bfloat16 | perceptron() | m.bfloat16()
model_to_eval | perceptron() | m.eval() | is_planned
sparse_layer
    | perceptron() | m[0].weight.data.mul_(m[0].weight.data > 0) | keeps_plan
parameter_attribute | perceptron() | m[0].weight.gain = 3.0
dropout_raised | dropping() | m[1].p = 0.9
dropout_off | dropping() | m[1].p = 0.0
dropout_to_eval | dropping() | m[1].eval()
dropout_in_place | dropping() | m[1].inplace = True
leaky_slope | leaking() | m[1].negative_slope = 0.9
adapter_scaled | adapted() | m[0].scale = 2.0
adapter_merged | adapted() | merged(m)
adapter_taken_off | adapted() | m[0] = m[0].layer
weight_norm | normed(parametrizations.weight_norm) |
spectral_norm | normed(parametrizations.spectral_norm) |
spectral_norm_to_eval | normed(parametrizations.spectral_norm) | m.eval()
old_weight_norm | normed(nn.utils.weight_norm) |
old_spectral_norm | normed(nn.utils.spectral_norm) |
old_weight_norm_removed
    | normed(nn.utils.weight_norm) | nn.utils.remove_weight_norm(m[0])
weight_norm_added | perceptron() | parametrizations.weight_norm(m[0])
parametrization_added
    | perceptron() | parametrize.register_parametrization(m[0], "weight", nn.Tanh())
parametrization_removed
    | parametrized() | parametrize.remove_parametrizations(m[0], "weight")
parametrizations_number
    | parametrized() | m[0].parametrizations.weight[0].factor = 3.0
pruned | perceptron() | prune.l1_unstructured(m[0], "weight", 0.5)
pruning_removed
    | normed(prune.l1_unstructured, name="weight", amount=0.5)
    | prune.remove(m[0], "weight")
pruning_mask_in_place
    | normed(prune.l1_unstructured, name="weight", amount=0.5)
    | m[0].weight_mask.fill_(1.0)
""")


@PROGRAMS(is_planned=True)
def everything_in_double() -> Training:
    model = perceptron()
    optimizer = adam(model)
    x, y = vectors()

    def change() -> None:
        model.double()
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].double()

    batches = [(x, y), (x, y), (x.double(), y), (x.double(), y)]
    return trained(model, optimizer=optimizer, batches=batches, change=change)


@PROGRAMS
def group_added() -> Training:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = optim.SGD(model[2].parameters(), 0.1, 0.9)
    model[0].requires_grad_(False)

    def change() -> None:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})

    return trained(model, optimizer=optimizer, change=change)


@PROGRAMS
def adapter_added() -> Training:
    model = perceptron()
    optimizer = sgd(model)

    def change() -> None:
        model[0] = LowRank(model[0])
        optimizer.param_groups[0]["params"] = [
            p for p in model.parameters() if p.requires_grad
        ]

    return trained(model, optimizer=optimizer, change=change)


# --- averages, copies, teachers


def averaged(name: str, make: Callable[[Any], Any], buffers: bool = False) -> None:
    """Add a program with an average of its model, made after each step."""

    def build() -> Training:
        model = convolutional()
        average = make(model)
        return Training(
            model,
            sgd(model),
            [images()],
            after=lambda number, loss: average.update_parameters(model),
            watched=lambda: list(average.state_dict().values()),
        )

    PROGRAMS(build, name=name, keeps_plan=True)


averaged("average_of_weights", swa_utils.AveragedModel)
averaged(
    "moving_average_of_weights",
    lambda m: swa_utils.AveragedModel(
        m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
)


@PROGRAMS
def average_swapped_in() -> Training:
    model = perceptron()
    average = swa_utils.AveragedModel(model)
    return trained(
        model,
        after=lambda number, loss: average.update_parameters(model),
        change=lambda: model.load_state_dict(average.module.state_dict()),
    )


@PROGRAMS(changes_in_step=True)
def average_made_by_the_optimizers_hook() -> Training:
    model = perceptron()
    optimizer = sgd(model)
    average = [p.detach().clone() for p in model.parameters()]

    def update(*_: Any) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(average, [*model.parameters()], 0.1)

    optimizer.register_step_post_hook(update)
    return trained(model, optimizer=optimizer, watched=lambda: list(average))


def near(teachers: list[Any], x: torch.Tensor) -> Callable[..., Any]:
    """Return a loss with the distance to what the first teacher answers."""
    apart = lambda out: (out - teachers[0](x)).square().mean()  # noqa: E731
    return lambda out, y: functional.cross_entropy(out, y) + apart(out)


@PROGRAMS
def teacher_follows() -> Training:
    """A teacher that is no part of the model, and is averaged between steps."""
    model = perceptron()
    teacher = copy.deepcopy(model).requires_grad_(False)
    x, y = vectors()
    loss = near([teacher], x)

    def after(number: int, value: torch.Tensor) -> None:
        with torch.no_grad():
            torch._foreach_lerp_([*teacher.parameters()], [*model.parameters()], 0.5)

    return trained(model, batches=[(x, y)], loss_fn=loss, after=after)


@PROGRAMS
def teacher_is_replaced() -> Training:
    model = perceptron()
    x, y = vectors()
    teachers = [perceptron().requires_grad_(False) for _ in range(2)]
    loss = near(teachers, x)
    return trained(model, batches=[(x, y)], loss_fn=loss, change=teachers.reverse)


# --- schedules of everything else


@PROGRAMS
def label_smoothing_anneals() -> Training:
    held = {"smoothing": 0.4}

    def loss(out, y):
        return functional.cross_entropy(out, y, label_smoothing=held["smoothing"])

    def after(number: int, value: torch.Tensor) -> None:
        held["smoothing"] *= 0.5

    return trained(perceptron(), loss_fn=loss, after=after)


@PROGRAMS
def temperature_anneals_in_place() -> Training:
    temperature = torch.tensor(2.0)
    loss = lambda out, y: functional.cross_entropy(out / temperature, y)  # noqa: E731
    return trained(perceptron(), loss_fn=loss, after=lambda *_: temperature.mul_(0.5))


def active(s: Any, out: torch.Tensor) -> torch.Tensor:
    for on, layer in zip(s.active, s.layers, strict=True):
        out = layer(out) if on else out
    return out


def saving(s: Any, out: torch.Tensor) -> torch.Tensor:
    if s.saves:
        return checkpoint.checkpoint(s.hidden, out, use_reentrant=False)
    return s.hidden(out)


def two_layers() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))


def exchanged(s: Any, out: torch.Tensor) -> torch.Tensor:
    s.one, s.other = s.other, s.one
    return out * s.one


def product(out: torch.Tensor) -> torch.Tensor:
    parts = torch.complex(out[:7, :3], out[:7, 1:])
    return out * (parts.sin() * parts.detach().t().contiguous().t()).abs().mean()


def rotated(out: torch.Tensor) -> torch.Tensor:
    out = out.t().contiguous().t()
    out /= out.detach().exp().contiguous()
    return out.mul_(out.detach().cos().contiguous()).div_(3)


def unbiased(layer: nn.Linear, out: torch.Tensor) -> torch.Tensor:
    bias, layer.bias = layer.bias, None
    out = layer(out)
    layer.bias = bias
    return out + layer.bias if isinstance(layer.bias, nn.Parameter) else out


def of_covariance(covariance: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    mean = torch.zeros(2)
    normal = torch.distributions.MultivariateNormal(
        mean, covariance, validate_args=True
    )
    return normal.log_prob(drawn).unsqueeze(1)


READS = MODULES.replace("{optimizer}", "optimizer=sgd(m), ")

PROGRAMS.table(globals(), READS, "attributes result change")("""
parameter_attribute_is_read
    | | out * getattr(s.net[0].weight, "gain", 1.0) | m.net[0].weight.gain = 3.0
buffers_are_exchanged
    | one=nn.Buffer(torch.zeros(4)), other=nn.Buffer(torch.ones(4))
    | exchanged(s, out) | | is_planned
gradient_is_set_by_the_step
    | | (setattr(s.net[0].weight, "grad", torch.ones(4, 6)), out)[1]
parameter_is_frozen_by_the_step_in_turns
    | bias=nn.Parameter(torch.zeros(4))
    | (s.bias.requires_grad_(not s.bias.requires_grad), out)[1] + s.bias
hook_of_a_parameter_is_added_by_the_step
    | | (s.net[0].weight.register_hook(lambda g: g / 2), out)[1]
gradients_appear | | out | for p in m.parameters(): p.grad = torch.ones_like(p)
gradient_is_read_that_eager_mode_has_not
    | | out * (1.0 if s.net[0].weight.grad is None else 3.0)
    | m.net[0].weight.grad = torch.ones_like(m.net[0].weight)
requires_grad_is_read
    | | out * (1.0 if s.net[0].bias.requires_grad else 3.0)
    | m.net[0].bias.requires_grad_(False)
depth_grows
    | layers=nn.ModuleList(two_layers()), depth=1
    | functools.reduce(lambda y, layer: layer(y), s.layers[: s.depth], out)
    | m.depth = 2
layers_are_active_by_a_list
    | layers=nn.ModuleList(two_layers()), active=[True, False] | active(s, out)
    | m.active.reverse()
checkpointing_is_turned_on
    | hidden=with_dropout(), saves=False | saving(s, out) | m.saves = True
task_is_switched
    | heads=nn.ModuleDict(zip("ab", two_layers())), task="a"
    | s.heads[s.task](out) | m.task = "b"
complex_products_round_otherwise_in_place | | product(out) | | is_planned
complex_tensors_are_changed_in_place
    | | rotated(torch.complex(out[:7, :3], out[:7, 1:])).abs().mean() * out
    | | is_planned
trained_number_of_another_model_is_read
    | others=[nn.Parameter(torch.ones(()))] | out * s.others[0].exp().detach()
    | m.others[0].data.add_(1.0) | is_planned
parameter_is_lent_to_the_step
    | last=nn.Linear(4, 4) | unbiased(s.last, out) | | is_planned
covariance_is_checked
    | | out * of_covariance(out[:2, :2] @ out[:2, :2].T + torch.eye(2), out[:, :2])
    | | is_planned
load_of_experts_is_read
    | load=nn.Buffer(torch.zeros(4)) | out * torch.exp(-s.load) | | is_planned
products_with_a_number_round_otherwise_in_place
    | | (out.bfloat16().abs() ** 1.7).float() | | is_planned
""")


@PROGRAMS(is_planned=True)
def gradients_of_earlier_micro_batches_are_zeroed() -> Training:
    model = Reading(lambda s, out: (s.net[0].zero_grad(), out)[1])
    return trained(model, optimizer=sgd(model), options={"accumulate": 2})


@PROGRAMS(is_planned=True)
def experts_have_a_load() -> Training:
    """`torch.load` would make a capture valid for one run."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron()
            self.load = nn.Buffer(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x)
            self.load.add_(torch.softmax(out.detach(), 1).mean(0))
            return out * torch.exp(-self.load)

    return trained(Experts())


@PROGRAMS(is_planned=True)
def loss_is_compiled() -> Training:
    loss_fn = torch.compile(functional.cross_entropy, backend="eager")
    return trained(perceptron(), loss_fn=loss_fn)


@PROGRAMS(is_planned=True)
def loss_returns_views_of_parameters() -> Training:
    model = perceptron()
    views = lambda: (model[0].bias[:2], model[2].weight.detach().t())  # noqa: E731
    loss_fn = lambda out, y: (functional.cross_entropy(out, y), views())  # noqa: E731
    return trained(model, loss_fn=loss_fn)


@PROGRAMS
def loss_changes_the_learning_rate() -> Training:
    model = perceptron()
    optimizer = sgd(model)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] *= 0.5
        return functional.cross_entropy(out, y)

    return trained(model, optimizer=optimizer, loss_fn=loss)


@PROGRAMS
def loss_adds_to_gradients_by_a_backward_pass_of_its_own() -> Training:
    critic = nn.Linear(4, 1)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        critic(out.detach()).sum().backward()
        (found := functional.cross_entropy(out, y)).backward(retain_graph=True)
        return found

    return trained(perceptron(), loss_fn=loss, watched=lambda: critic.weight.grad)


@PROGRAMS(is_planned=True)
def loss_has_a_backward_pass_to_a_tensor_of_its_own() -> Training:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        functional.cross_entropy(own := out.detach().requires_grad_(), y).backward()
        return functional.cross_entropy(out + own.grad, y)

    return trained(perceptron(), loss_fn=loss)


@PROGRAMS
def task_is_switched_with_every_step() -> Training:
    heads = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model = Reading(lambda s, out: s.heads[s.task](out), heads=heads, task="a")
    return trained(
        model,
        optimizer=sgd(model),
        before=lambda number: setattr(model, "task", "ab"[number % 2]),
    )


class Spectral(nn.Module):
    """With complex parameters, which decay by a rate."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=6))


@PROGRAMS(keeps_plan=True)
def complex_parameters() -> Training:
    model = Spectral()
    return trained(model, optimizer=optim.AdamW(model.parameters(), 0.01))


@PROGRAMS(keeps_plan=True)
def gradient_penalty() -> Training:
    """The loss has the norm of the model's gradient by its input."""

    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

        def forward(self, x):
            x = x.detach().requires_grad_()
            y = self.model(x)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y, gradient.norm(dim=1)

    def loss(found, y):
        return functional.cross_entropy(found[0], y) + ((found[1] - 1) ** 2).mean()

    return trained(Penalised(), loss_fn=loss)


@PROGRAMS(keeps_plan=True)
def a_module_twice() -> Training:
    inner = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.BatchNorm1d(6))
    model = nn.Sequential(inner, inner, nn.Linear(6, 4))
    return trained(model, optimizer=sgd(model))


@PROGRAMS(is_planned=True)
def a_batch_decides() -> Training:
    """What is decided by a batch has a plan for each outcome."""

    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) if mask.all() else super().forward(x * mask)

    x, y = vectors()
    whole = torch.ones(8, 1)
    batches = [((x, mask), y) for mask in (whole, whole.tril(-1), whole)]
    return trained(Masked(6, 4), batches=batches)


for clipping in ("clip_norm", "clip_value"):
    PROGRAMS(
        lambda clipping=clipping: trained(perceptron(), options={clipping: 0.01}),
        name=f"gradients_by_{clipping}",
        keeps_plan=True,
    )


@PROGRAMS
def clipped_gradients_of_a_changed_layer() -> Training:
    model = perceptron()
    return trained(
        model,
        optimizer=sgd(model),
        options={"clip_norm": 0.5},
        change=lambda: setattr(model[1], "forward", torch.tanh),
    )


@PROGRAMS
def sequence_model_changes_its_direction() -> Training:
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(10, 8)
            self.cell = nn.GRU(8, 32, batch_first=True)
            self.last = nn.Linear(32, 4)
            self.backward = False

        def forward(self, x):
            x = x.flip(1) if self.backward else x
            return self.last(self.cell(self.words(x))[0][:, -1])

    model = Tagger()
    batch = torch.randint(0, 10, (4, 5)), torch.randint(0, 4, (4,))
    return trained(
        model, batches=[batch], change=lambda: setattr(model, "backward", True)
    )


@PROGRAMS
def embedding_padding_index() -> Training:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 4))
    batch = torch.randint(0, 10, (8, 3)), torch.randint(0, 4, (8,))
    return trained(
        model, batches=[batch], change=lambda: setattr(model[0], "padding_idx", 3)
    )


@PROGRAMS
def heads_of_attention_change() -> Training:
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.last = nn.Linear(6, 4)
            self.causal = False

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(3)
            found, _ = self.attention(
                x, x, x, attn_mask=mask if self.causal else None, need_weights=False
            )
            return self.last(found.mean(1))

    model = Attending()
    batch = torch.randn(4, 3, 6), torch.randint(0, 4, (4,))
    return trained(
        model, batches=[batch], change=lambda: setattr(model, "causal", True)
    )
