"""Programs whose tensors change layout, memory or owner, and PyTorch's settings."""

# ruff: noqa: F401  (rows of tables use what is imported)

import contextlib
import decimal
import functools
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.torch_programs import (
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

LAST = torch.channels_last


def of_images(model: nn.Module, **others: Any) -> Training:
    others = {"batches": [images()], "optimizer": sgd(model), **others}
    return Training(model, **others)


# --- strides and memory formats


CONVOLUTIONAL = """
def build():
    m = convolutional()
    {made}
    def change():
        {change}
    return of_images(m, change=change)
"""
"""Of a convolutional network: what is done with it at first, and a change."""

convolutional_networks = PROGRAMS.table(globals(), CONVOLUTIONAL, "made change")

convolutional_networks("""
channels_last_weights | m.to(memory_format=LAST)
channels_last_later | | m.to(memory_format=LAST)
channels_last_no_more
    | m.to(memory_format=LAST) | m.to(memory_format=torch.contiguous_format)
one_weight_in_another_layout
    | | m[0].weight.data = m[0].weight.data.transpose(2, 3).contiguous().mT
linear_weight_transposed_in_memory
    | | m[5].weight.data = m[5].weight.data.t().contiguous().t()
weight_in_a_part_of_larger_memory
    | | m[5].weight.data = torch.zeros(4, 20)[:, 2:18]
weight_with_an_offset | | m[5].weight.data = torch.ones(72)[8:].view(4, 16)
onednn_off_for_convolutions | | torch._C._set_mkldnn_enabled(False)
""")


def inputs(
    name: str, lay: Callable[[torch.Tensor], torch.Tensor], first: bool = False
) -> None:
    """Add a program whose input lies otherwise in memory, from the start or later."""

    def build() -> Training:
        x, y = images()
        other = lay(x), y
        batches = [other] if first else [(x, y), (x, y), other, other]
        return of_images(convolutional(), batches=batches)

    PROGRAMS(build, name=name)


inputs("channels_last_input", lambda x: x.to(memory_format=LAST), first=True)
inputs("channels_last_input_later", lambda x: x.to(memory_format=LAST))
inputs("transposed_input_later", lambda x: x.mT.contiguous().mT)
inputs("transposed_input", lambda x: x.mT.contiguous().mT, first=True)
inputs("sliced_input_later", lambda x: x.repeat(1, 1, 1, 2)[..., ::2])
inputs("expanded_input_later", lambda x: x[:1].expand_as(x))
inputs("input_with_an_offset_later", lambda x: torch.cat([x, x])[2:6])
inputs("flipped_input_later", lambda x: x.flip(0))


@PROGRAMS
def sequences_change_their_length() -> Training:
    x, y = torch.randn(4, 6, 6), torch.randint(0, 4, (4, 6))
    batches = [(x[:, :n], y[:, :n].contiguous()) for n in (6, 4, 6, 4)]

    def loss(out, y):
        return functional.cross_entropy(out.flatten(0, 1), y.flatten())

    return trained(perceptron(), batches=batches, loss_fn=loss)


@PROGRAMS(is_planned=True)
def last_batch_is_smaller() -> Training:
    x, y = vectors()
    return trained(perceptron(), batches=[(x, y), (x[:5], y[:5])])


# --- memory that several tensors share


@PROGRAMS
def parameters_of_one_flat_buffer() -> Training:
    """Side by side, as flat parameters are: nothing overlaps."""
    model = perceptron()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    sizes = [p.numel() for p in model.parameters()]
    for p, part in zip(model.parameters(), flat.split(sizes), strict=True):
        p.data = part.view_as(p)
    return trained(model, optimizer=sgd(model))


def squares() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


SQUARES = """
def build():
    m = squares()
    {made}
    optimizer = sgd(m)
    def change():
        {change}
    return trained(m, optimizer=optimizer, change=change)
"""
"""Of two layers of equal sizes: what is done with them at first, and a change."""

PROGRAMS.table(globals(), SQUARES, "made change")("""
parameters_share_memory | m[2].weight = nn.Parameter(m[0].weight.data)
parameters_share_memory_later | | m[2].weight.data = m[0].weight.data
parameters_share_memory_no_more
    | m[2].weight = nn.Parameter(m[0].weight.data)
    | m[2].weight.data = m[0].weight.data.clone()
parameters_overlap_in_part
    | memory = torch.randn(9, 6)
    ; m[0].weight.data, m[2].weight.data = memory[:6], memory[3:]
parameter_is_another_ones_transpose | m[2].weight = nn.Parameter(m[0].weight.data.t())
tied_later | | m[2].weight = m[0].weight
tied_no_more
    | m[2].weight = m[0].weight
    | m[2].weight = nn.Parameter(m[0].weight.detach().clone())
    ; optimizer.add_param_group({"params": [m[2].weight]})
""")

READS = """
def build():
    def read(s, out):
        {result}
    m = Reading(read)
    {made}
    def change():
        {change}
    return trained(m, optimizer=sgd(m), change=change)
"""
"""Of a module: its result, what is done with it at first, and a change."""

reads = PROGRAMS.table(globals(), READS, "result made change")

reads("""
buffer_is_a_view_of_a_parameter
    | out + s.seen.sum() | m.register_buffer("seen", m.net[0].weight.detach()[0])
buffer_becomes_a_view_of_a_parameter
    | out + s.seen.sum() | m.register_buffer("seen", torch.ones(6))
    | m.seen = m.net[0].weight.detach()[0]
plain_tensor_is_a_view_of_a_parameter
    | out + s.seen[0].sum() | m.seen = [m.net[0].weight.detach()[0]]
buffers_share_memory
    | s.counted.add_(1); out * s.seen
    | m.register_buffer("counted", torch.zeros(1))
    ; m.register_buffer("seen", m.counted.view(()))
parameter_in_a_set
    | out + sum(p.sum() for p in s.parameters() if p in s.some)
    | m.some = {m.net[0].weight} | m.some.clear()
parameter_with_a_name_in_a_dict
    | out + sum(p.sum() for p in s.parameters() if s.names.get(p) == "net.0.bias")
    | m.names = {p: name for name, p in m.named_parameters()}
parameter_with_its_identity_in_a_set
    | out + sum(p.sum() for p in s.parameters() if id(p) in s.some)
    | m.some = {id(m.net[0].weight)} | m.some.clear()
parameter_is_one_in_a_list
    | out + sum(p.sum() for p in s.parameters() if p is s.some[0])
    | m.some = [m.net[0].weight]
tensor_compared_with_a_new_one
    | out * max(s.a, torch.tensor(1.0)) | m.a = torch.tensor(0.5) | m.a.fill_(3.0)
tensor_read_by_numpy
    | out * float(np.asarray(s.a)) | m.a = torch.tensor(0.5) | m.a.fill_(3.0)
normal_numbers_in_a_part_of_a_tensor
    | drawn = torch.zeros(8, 5); drawn[:, :4].normal_(); out + drawn[:, :4]
tensors_written_in_turn_by_one_call
    | z = out.detach(); p = [z + 1, z * 2]; torch._foreach_mul_(p, p[::-1]); out + p[1]
""")


@PROGRAMS
def parameter_that_is_expanded() -> Training:
    model = Reading(
        lambda s, out: out * s.gain, gain=nn.Parameter(torch.ones(1).expand(4))
    )
    return trained(model, optimizer=torch.optim.SGD(model.net.parameters(), 0.1))


@PROGRAMS
def state_shares_memory_with_a_parameter() -> Training:
    model = perceptron()
    optimizer = sgd(model)

    def change() -> None:
        weight = model[0].weight
        optimizer.state[weight]["momentum_buffer"] = weight.detach()

    return trained(model, optimizer=optimizer, change=change)


# --- memory of a batch


def mean_square(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out - y).square().mean()


class Halving(nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x.mul_(0.5))


def of_batch(
    name: str,
    make: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    model_of: Callable[[], nn.Module],
    later: bool = False,
) -> None:
    """Add a program of which input and target share memory, from the start or later."""

    def build() -> Training:
        model = model_of()
        odd, apart = make(), (torch.randn(8, 6), torch.randn(8, 6))
        batches = [apart, apart, odd, odd] if later else [odd]
        return trained(model, batches=batches, loss_fn=mean_square)

    PROGRAMS(build, name=name)


def twice() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 6)
    return x, x


def overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.randn(9, 6)
    return memory[:8], memory[1:]


def viewed() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 6)
    return x, x.view(8, 6)


of_batch("target_is_the_input", twice, squares)
of_batch("target_is_the_input_later", twice, squares, later=True)
of_batch("target_is_the_input_that_is_changed", twice, Halving)
of_batch("target_is_the_input_that_is_changed_later", twice, Halving, later=True)
of_batch("target_is_a_view_of_the_input_that_is_changed", viewed, Halving)
of_batch("target_overlaps_the_input_that_is_changed", overlapping, Halving)
of_batch("input_is_changed", lambda: (torch.randn(8, 6), torch.randn(8, 6)), Halving)


@PROGRAMS
def target_is_changed_by_the_loss() -> Training:
    def loss(out, y):
        return (out - y.mul_(0.9)).square().mean()

    batch = torch.randn(8, 6), torch.randn(8, 6)
    return trained(squares(), batches=[batch], loss_fn=loss)


def of_a_weight(first: int) -> Training:
    """Return a training whose input is a parameter's memory from a step on."""
    model, y = squares(), torch.randn(6, 6)
    batches = [(torch.randn(6, 6), y)] * first + [(model[first].weight.detach(), y)] * 2
    return trained(model, batches=batches, loss_fn=mean_square)


PROGRAMS(lambda: of_a_weight(0), name="input_is_a_parameters_memory")
PROGRAMS(lambda: of_a_weight(2), name="input_is_a_parameters_memory_later")


@PROGRAMS
def input_is_a_buffer_that_counts() -> Training:
    def read(s, out):
        s.seen.add_(1)
        return out

    model = Reading(read)
    model.register_buffer("seen", torch.randn(8, 6))
    return trained(model, batches=[(model.seen, vectors()[1])])


BATCHES = """
def build():
    x, y = vectors()
    later = {x}, {y}
    return trained(perceptron(), batches=[(x, y), (x, y), later, later])
"""

PROGRAMS.table(globals(), BATCHES, "x y")("""
input_wants_a_gradient_later | x.clone().requires_grad_() | y
input_is_a_parameter | nn.Parameter(x) | y
input_changes_its_type | x.double() | y
target_changes_its_type | x | functional.one_hot(y, 4).float()
""")


class Taking(nn.Module):
    """Takes arguments by name, and numbers, texts and None among them."""

    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, scale=1.0, mode="plain", mask=None):
        out = self.net(x) * scale
        out = out.tanh() if mode == "squashed" else out
        return out if mask is None else out * mask


def arguments(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Add a program whose model is called with other arguments from the third step."""

    def build() -> Training:
        x, y = vectors()
        first, later = ({"x": x, **before}, y), ({"x": x, **after}, y)
        return trained(Taking(), batches=[first, first, later, later])

    PROGRAMS(build, name=name)


arguments("number_argument", {"scale": 1.0}, {"scale": 3.0})
arguments("number_argument_of_another_type", {"scale": 1}, {"scale": True})
arguments("text_argument", {"mode": "plain"}, {"mode": "squashed"})
arguments("argument_appears", {}, {"mode": "squashed"})
arguments("none_argument", {"mask": None}, {"mask": torch.tensor([0.0, 1, 1, 1])})
arguments(
    "argument_order",
    {"scale": 2.0, "mode": "squashed"},
    {"mode": "plain", "scale": 2.0},
)


# --- buffers and batch norm


def without_statistics(norm: Any) -> None:
    norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    norm.track_running_stats = False


convolutional_networks("""
stride_of_a_convolution | | m[0].stride = (2, 2)
padding_of_a_convolution | | m[0].padding = (2, 2)
dilation_of_a_convolution | | m[0].dilation = (2, 2)
momentum_of_a_norm | | m[1].momentum = 0.5
momentum_of_a_norm_from_none | m[1].momentum = None | m[1].momentum = 0.5
momentum_of_a_norm_to_none | | m[1].momentum = None
eps_of_a_norm | | m[1].eps = 0.5
norm_to_eval | | m[1].eval()
statistics_not_tracked | | m[1].track_running_stats = False
running_mean_to_none | | m[1].running_mean = None
running_statistics_to_none | | m[1].running_mean = m[1].running_var = None | is_planned
statistics_to_none | | without_statistics(m[1])
statistics_reset | | m[1].reset_running_stats()
statistics_replaced | | m[1].running_mean = torch.ones(4)
statistics_of_another_type | | m[1].running_mean = torch.ones(4).double()
weight_of_a_norm_to_none | | m[1].register_parameter("weight", None)
batches_counted_to_none | | m[1].num_batches_tracked = None
batches_counted_set | m[1].momentum = None | m[1].num_batches_tracked.fill_(10)
""")


def gained(s: Any, out: torch.Tensor) -> torch.Tensor:
    return out if s.gain is None else out * s.gain


def with_gain(module: nn.Module) -> None:
    module.register_buffer("gain", torch.full((4,), 2.0))


reads("""
buffer_in_place | gained(s, out) | with_gain(m) | m.gain.mul_(2) | keeps_plan
buffer_replaced | gained(s, out) | with_gain(m) | m.gain = torch.ones(4)
buffer_to_none | gained(s, out) | with_gain(m) | m.gain = None
buffer_from_none
    | gained(s, out) | m.register_buffer("gain", None) | m.gain = torch.ones(4) * 3
buffer_of_another_shape | gained(s, out) | with_gain(m) | m.gain = torch.ones(1)
buffer_of_another_type
    | gained(s, out) | with_gain(m) | m.gain = torch.ones(4, dtype=torch.long)
buffer_added
    | gained(s, out) | with_gain(m) | m.register_buffer("other", torch.ones(1))
    | is_planned
buffer_registered_again
    | gained(s, out) | with_gain(m) | m.register_buffer("gain", torch.ones(4))
buffer_becomes_a_parameter
    | gained(s, out) | with_gain(m) | del m.gain; m.gain = nn.Parameter(torch.ones(4))
buffer_becomes_an_attribute | gained(s, out) | with_gain(m) | del m.gain; m.gain = 3.0
buffer_that_anneals
    | s.heat.mul_(0.5); out / s.heat | m.register_buffer("heat", torch.ones(()))
""")


# --- settings of PyTorch


def autocast_on(kind: torch.dtype = torch.bfloat16) -> None:
    torch.set_autocast_dtype("cpu", kind)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_cache_enabled(False)  # no context is left that would empty it


def attended(out: torch.Tensor) -> torch.Tensor:
    q = out.view(1, 2, 4, 4)
    y = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return y.reshape(8, 4)


settings = PROGRAMS.table(globals(), READS, "result change made")

settings("""
default_dtype
    | out * (torch.tensor(1.0) / 3).to(out.dtype)
    | torch.set_default_dtype(torch.float64)
default_dtype_is_read
    | out * torch.get_default_dtype().itemsize | torch.set_default_dtype(torch.float64)
default_device
    | out * (3.0 if torch.zeros(1).device.type == "meta" else 1.0)
    | torch.set_default_device("meta")
autocast_on | out | autocast_on()
autocast_is_read | out * 3 if torch.is_autocast_enabled("cpu") else out | autocast_on()
deterministic
    | out.index_add(1, torch.tensor([0, 0]), out[:, :2])
    | torch.use_deterministic_algorithms(True)
deterministic_is_read
    | out * 3 if torch.are_deterministic_algorithms_enabled() else out
    | torch.use_deterministic_algorithms(True)
gradients_off | out | torch.set_grad_enabled(False)
gradient_mode_is_read | out * 3 if torch.is_grad_enabled() else out
precision_of_products | out | torch.set_float32_matmul_precision("medium")
precision_of_products_is_read
    | out * len(torch.get_float32_matmul_precision())
    | torch.set_float32_matmul_precision("medium")
tensor_float32 | out | torch.backends.cuda.matmul.allow_tf32 = True
number_of_threads | out | torch.set_num_threads(2)
number_of_threads_is_read | out * torch.get_num_threads() | torch.set_num_threads(2)
anomalies_detected | out | torch.set_anomaly_enabled(True)
anomalies_and_not_a_number | out * float("nan") | torch.set_anomaly_enabled(True)
onednn_off | out | torch._C._set_mkldnn_enabled(False)
onednn_is_read
    | out * 3 if torch.backends.mkldnn.enabled else out
    | torch._C._set_mkldnn_enabled(False)
tensors_printed_otherwise | out | torch.set_printoptions(precision=4) | | keeps_plan
onednn_is_deterministic
    | out * 3 if torch.backends.mkldnn.deterministic else out
    | torch._C._set_mkldnn_deterministic(True) | | is_planned
fast_path_of_attention
    | out * 3 if torch.backends.mha.get_fastpath_enabled() else out
    | torch.backends.mha.set_fastpath_enabled(False) | | is_planned
distributions_check_their_arguments
    | out * 3 if torch.distributions.Normal(out, out.exp())._validate_args else out
    | torch.distributions.Distribution.set_default_validate_args(False) | | is_planned
digits_of_decimal_numbers
    | out * float(Decimal(1) / Decimal(3)) | decimal.getcontext().prec = 2
    | | is_planned
numpy_raises
    | out * (1.0 + float(np.float32(1) / np.float32(0) > 0)) | np.seterr(divide="raise")
attention_by_another_kernel | attended(out) | torch._C._set_sdp_use_flash(False)
""")


def within(
    name: str,
    context: Callable[[], contextlib.AbstractContextManager[Any]],
    **others: bool,
) -> None:
    """Add a program whose steps are made within a context from the third on."""

    def around(number: int) -> contextlib.AbstractContextManager[Any]:
        return context() if number >= 2 else contextlib.nullcontext()

    def build() -> Training:
        model = perceptron()
        return trained(model, around=around, optimizer=sgd(model))

    PROGRAMS(build, name=name, **others)


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2 if tensor.is_floating_point() else tensor


within("within_no_grad", torch.no_grad)
within("within_inference_mode", torch.inference_mode)
within(
    "within_autocast",
    functools.partial(torch.autocast, "cpu", torch.bfloat16),
    is_planned=True,
)
within("within_float16", functools.partial(torch.autocast, "cpu", torch.float16))
within("within_a_device", functools.partial(torch.device, "cpu"))
within("within_anomaly_detection", torch.autograd.detect_anomaly)
within(
    "within_saved_tensors_hooks",
    lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, doubled),
)
within("within_saving_on_the_host", torch.autograd.graph.save_on_cpu)


class Doubling(torch.overrides.TorchFunctionMode):
    """Doubles what linear layers give."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is functional.linear else out


within("within_a_function_mode", Doubling)


@PROGRAMS
def autocast_turned_in_the_forward_pass() -> Training:
    def read(s, out):
        with torch.autocast("cpu", torch.bfloat16, enabled=s.casts):
            return (out @ out.T @ out).float()

    model = Reading(read, casts=False)
    return trained(model, change=lambda: setattr(model, "casts", True))


@PROGRAMS
def autocast_of_another_type() -> Training:
    return trained(
        perceptron(),
        before=lambda n: autocast_on(torch.bfloat16 if n < 2 else torch.float16),
    )


@PROGRAMS
def autocast_off() -> Training:
    switch = functools.partial(torch.set_autocast_enabled, "cpu")
    return trained(perceptron(), before=lambda n: (autocast_on(), switch(n < 2)))


@PROGRAMS
def gradients_turned_off_in_the_forward_pass() -> Training:
    def read(s, out):
        with torch.set_grad_enabled(s.learns):
            hidden = s.hidden(out)
        return out + hidden

    model = Reading(read, learns=True, hidden=nn.Linear(4, 4))
    return trained(model, change=lambda: setattr(model, "learns", False))


# --- what a tensor of a batch is to Python


class Plain(torch.Tensor):
    """A class without a `__torch_function__` of its own."""


class Asking(nn.Module):
    """A layer, thrice as much where the answer to a question about its input is yes."""

    def __init__(self, question: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.question = nn.Linear(6, 4), question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 1.0) * (3.0 if self.question(x) else 1.0)


def asked(
    name: str,
    question: Callable[[torch.Tensor], bool],
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Add two programs that change the input of the third step, or of every step."""

    def build(changed: Callable[[int], bool]) -> Training:
        batches = [vectors() for _ in range(4)]
        batches = [
            (change(x) if changed(i) else x, y) for i, (x, y) in enumerate(batches)
        ]
        return trained(Asking(question), batches=batches)

    PROGRAMS(lambda: build(lambda i: i == 2), name=f"{name}_of_one_input")
    PROGRAMS(lambda: build(lambda i: True), name=f"{name}_of_every_input")


def scaled(x: torch.Tensor) -> torch.Tensor:
    x.scale = 3.0
    return x


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    x.grad = torch.ones_like(x)
    return x


asked("attribute", lambda x: hasattr(x, "scale"), scaled)
asked("base", lambda x: x._base is not None, lambda x: x[:])
asked("class", lambda x: type(x) is Plain, lambda x: x.as_subclass(Plain))
asked("gradient", lambda x: x.grad is not None, with_gradient)
asked("offset", lambda x: x.storage_offset() > 0, lambda x: torch.cat([x, x])[len(x) :])
asked("parameter", lambda x: isinstance(x, nn.Parameter), nn.Parameter)
asked("shared", lambda x: x.is_shared(), lambda x: x.share_memory_())
asked(
    "storage",
    lambda x: x.untyped_storage().nbytes() > x.nbytes,
    lambda x: torch.cat([x, x])[: len(x)],
)
asked("version", lambda x: x._version > 0, lambda x: x.add_(0))


@PROGRAMS
def input_has_an_attribute() -> Training:
    batch = scaled(torch.randn(8, 6)), torch.randint(0, 4, (8,))
    change = functools.partial(setattr, batch[0], "scale", 1.0)
    return trained(Asking(lambda x: x.scale > 2), batches=[batch], change=change)


@PROGRAMS(is_planned=True)
def marked_by_the_compiler() -> Training:
    """`torch.compile` gives tensors attributes where it has seen other shapes."""
    x, y = vectors()
    x._dynamo_propagated_dynamic_indices = {0}
    return trained(perceptron(), batches=[(x, y)])
