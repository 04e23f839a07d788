"""What models may do under `torch.compile` within a budget: eager's bits in all."""

import importlib
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint  # noqa: F401  (in a row)

import mucudnn.torch as mt
from mucudnn.errors import PlanningError, UnsupportedError
from tests.torch_backends import WithLoss, check_against_eager
from tests.torch_marks import COMPILED
from tests.torch_programs import rows_of
from tests.torch_steps import build, least_bytes

pytestmark = COMPILED

WIDTH = 48


class Model(nn.Module):
    """Two layers, and what a test does with them."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = forward

    def forward(self, *batch):
        return self.function(self, *batch)

    def hidden(self, x):
        return functional.gelu(self.first(x)).relu() * 2


def freeze(model):
    model.first.requires_grad_(requires_grad=False)


def tie(model):
    model.second.weight = model.first.weight


def widen(model):
    """Add a parameter whose gradient has other strides, and two with one gradient."""
    model.wide = nn.Parameter(torch.randn(3, WIDTH, 3 * WIDTH))
    model.left, model.right = (nn.Parameter(torch.randn(3 * WIDTH)) for _ in "ab")


def count(model):
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    model.register_buffer("average", torch.zeros(WIDTH))
    model.norm = nn.BatchNorm1d(WIDTH)


def maker(forward, inputs=1, change=None, needs=False):
    """Return what makes a model, always the same, and its batch."""

    def make():
        torch.manual_seed(0)
        model = Model(forward)
        if change is not None:
            change(model)
        return model, [
            torch.randn(64, WIDTH).requires_grad_(needs) for _ in range(inputs)
        ]

    return make


CASE = """
def build():
    def forward(m, x, other=None):
        {result}
    return maker(forward, {options})
"""
"""Of what a model `m` with two layers gives for its batch."""

CASES = {
    name: build
    for name, build, _ in rows_of(
        """
inputs that need gradients
    | m.second(m.hidden(x) * other).square().mean() | inputs=2, needs=True
frozen parameters | m.second(m.hidden(x)).square().mean() | change=freeze
tied weights | m.second(m.hidden(x)).square().mean() | change=tie
gradients that autograd would copy
    | y = torch.einsum("nd,edf->nef", m.second(m.hidden(x[:4])), m.wide)
    ; (y + (m.left + m.right)).square().mean()
    | change=widen
buffers that change
    | y = m.norm(m.hidden(x)); m.calls += 1
    ; m.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    ; (m.second(y) * m.average).square().mean() | change=count
inputs that change | x.mul_(2).add_(1); m.second(m.hidden(x)).square().mean()
autocast inside | by_autocast(m, x).float().square().mean()
a checkpoint inside
    | y = checkpoint(m.hidden, x, use_reentrant=False)
    ; m.second(functional.dropout(y, 0.1)).square().mean()
""",
        globals(),
        CASE,
        "result options",
    )
}


def by_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.second(model.hidden(x))


@pytest.mark.parametrize("name", CASES)
def test_a_model_has_the_bits_of_eager_mode(name):
    check_against_eager(CASES[name]())


RUN = """
def build():
    def forward(m, x):
        {result}
    def run(call, x):
        {run}
    return maker(forward), run
"""
"""Of a model's results, and of what is done with them."""

RUNS = {
    name: build
    for name, build, _ in rows_of(
        """
two losses
    | y = m.second(m.hidden(x)); (y.square().mean(), y.abs().mean())
    | first, second = call(x); first.backward(retain_graph=True); second.backward()
    ; (first, second)
one backward pass of two losses
    | y = m.second(m.hidden(x)); (y.square().mean(), y.abs().mean())
    | first, second = call(x); (first + second).backward(); (first, second)
one of two losses
    | y = m.second(m.hidden(x)); (y.square().mean(), y.abs().mean())
    | first, second = call(x); second.backward(); (first, second)
results of which some need no gradient
    | y = m.second(m.hidden(x)); (y.argmax(1), y.detach() * 3, y.tanh(), y.sigmoid())
    | chosen, scaled, left, right = call(x)
    ; assert not chosen.requires_grad and not scaled.requires_grad
    ; (left.sum() + right.square().sum()).backward(); (chosen, scaled, left, right)
views that are returned
    | y = m.second(m.hidden(x)); (y.view(32, -1), y[:8].t(), x.view(32, -1))
    | wide, some, given = call(x)
    ; assert memory_of(given) == memory_of(x) != memory_of(some) == memory_of(wide)
    ; (wide.square().mean() + some.sum()).backward(); (wide, some, given)
one result twice, as distributions return their parameters
    | y = m.second(m.hidden(x)); (y, torch.broadcast_tensors(y, y * 2)[0])
    | one, other = call(x); (one.tanh().sum() + other.square().sum()).backward()
    ; (one, other)
gradients of several backward passes
    | m.second(functional.dropout(m.hidden(x))).square().mean()
    | losses = [call(x * k) for k in (1, 2, 3)]
    ; [losses[k].backward() for k in (1, 2, 0)]; losses
results that the backward pass reads
    | y = m.hidden(x); z = functional.gelu(m.second(y))
    ; (y, z.exp(), z.tanh().square().mean())
    | hidden, grown, loss = call(x); held = hidden.clone(), grown.clone()
    ; loss.backward(); (hidden, grown, loss, *held)
results that nothing reads are changed
    | y = m.second(m.hidden(x)); (y.square().mean(), y * 3)
    | loss, scaled = call(x); scaled.detach().zero_(); loss.detach().div_(2)
    ; loss.backward(); (loss, scaled)
""",
        globals(),
        RUN,
        "result run",
    )
}


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:saved tensors of")
@pytest.mark.parametrize("name", RUNS)
def test_results_of_a_model_are_those_of_eager_mode(name):
    check_against_eager(*RUNS[name](), measured=False)


def test_inputs_of_one_memory_may_be_apart_later():
    x, other = torch.randn(2, 4, 6)
    layer = nn.Linear(6, 3)
    call = torch.compile(lambda a, b: layer(a) * b.sum(), backend=mt.backend())
    for given in ((x, x.detach()), (x, other), (x[1:], x[1:].detach()), (x[1:], x)):
        wanted = layer(given[0]) * given[1].sum()
        found = call(*given)
        assert torch.equal(found, wanted)
        gradients = [
            torch.autograd.grad(out.square().sum(), layer.weight)[0]
            for out in (wanted, found)
        ]
        assert torch.equal(*gradients)


def test_autocast_around():
    def plain(self, x):
        return self.second(self.hidden(x)).float().square().mean()

    def run(call, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(x)
        loss.backward()
        return [loss]

    check_against_eager(maker(plain), run)


def test_new_values_of_buffers_go_when_they_are_written_back():
    def peak(updates):
        torch.manual_seed(0)
        torch._dynamo.reset()
        layers = [nn.Linear(256, 256) for _ in range(6)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(256))
        model.register_buffer("average", torch.zeros(1024, 256))

        def loss(x):
            if updates:
                model.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return model(x).square().mean()

        backend = mt.backend(cache=None)
        torch.compile(loss, backend=backend)(torch.randn(8, 256)).backward()
        [plan] = backend.plans
        return plan.peak_bytes - plan.resident_bytes

    assert peak(True) < peak(False) + (64 << 10)  # of 1 MiB


def test_new_statistics_of_frozen_norms_are_there_when_the_forward_pass_is_over():
    """Nothing but those statistics keeps what they are made with from going."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU()),
            *(nn.Flatten(), nn.Linear(8 * 16, 5)),
        )
        for i in (0, 1, 3):
            model[i].requires_grad_(False)
        batch = torch.randn(2, 3, 8, 8), torch.randint(0, 5, (2,))
        return WithLoss(model, functional.cross_entropy), batch

    check_against_eager(make)


class Net(nn.Module):
    """Two layers; their loss comes with all that is between them."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 3)
        self.reduction = reduction

    def forward(self, x, targets, count):
        linear = self.first(x)
        read = functional.silu(linear)
        logits = self.last(read)
        losses = logits.flatten(0, -2), targets.flatten()
        loss = functional.cross_entropy(*losses, reduction=self.reduction)
        if self.reduction == "sum":
            loss = loss / count
        return {"loss": loss, "logits": logits, "read": read, "linear": linear}


def gradients(reduction, change, backend, shape=(4, 5)):
    """Of the loss, after its graph's results were changed; `eager` for no backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(reduction)
    call = net if backend == "eager" else torch.compile(net, backend=backend)
    batch = torch.randn(*shape, 8), torch.randint(3, shape), torch.tensor(20)
    found = call(*batch)
    change(found)
    found["loss"].backward()
    return [parameter.grad for parameter in net.parameters()]


def backends(reduction):
    """Without a limit, and with the least one."""
    refusing = mt.backend(budget=0, cache=None)
    least = least_bytes(gradients, reduction, dict, refusing)
    return [mt.backend(budget=budget, cache=None) for budget in (None, least)]


def halved(name):
    def change(found):
        found[name] /= 2

    return change


def halved_in_a_view(name):
    def change(found):
        found[name].view(-1).detach().mul_(0.5)

    return change


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["loss", "logits"])
def test_a_result_that_the_backward_pass_does_not_read(reduction, name):
    """As trainers do that divide the loss by a count."""
    wanted = gradients(reduction, halved(name), "eager")
    for backend in backends(reduction):
        found = gradients(reduction, halved(name), backend)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("name", "shape"), [("read", (4, 5)), ("linear", (4,))])
def test_a_result_that_the_backward_pass_reads(name, shape):
    """The weights' gradient reads a view of it, or the activation's reads it."""
    for backend in ("eager", *backends("mean")):
        for changed in (halved, halved_in_a_view):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients("mean", changed(name), backend, shape)


def test_a_loss_that_only_eager_mode_reads_again():
    """A norm's gradient needs it; what it is needed for is computed before it leaves.

    So nothing that has changed is read, and the gradients are those of what it was.
    """

    def run(change, backend):
        torch._dynamo.reset()
        x = torch.arange(1.0, 5.0, requires_grad=True)

        def norm(x):
            return (2 * x).norm()

        call = norm if backend is None else torch.compile(norm, backend=backend)
        change(call(x)).backward()
        return x.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(lambda loss: loss.div_(2), None)
    found = run(lambda loss: loss.div_(2), mt.backend(cache=None))
    assert torch.equal(found, run(lambda loss: loss / 2, None))


def compiled(name, budget):
    """A model with its loss inside, compiled; its backend; a batch."""
    model, loss_fn, batch = build(name)
    torch._dynamo.reset()
    backend = mt.backend(budget=budget)
    both = WithLoss(model, loss_fn)
    return torch.compile(both, backend=backend, fullgraph=True), backend, batch, model


def step(call, batch, model):
    torch.manual_seed(1)
    model.zero_grad()
    loss = call(*batch)
    loss.backward()
    return loss.item()


def outcome(model):
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return gradients | {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_gradients_and_buffers_are_eager_ones_within_a_budget(name):
    def make():
        model, loss_fn, batch = build(name)
        return WithLoss(model, loss_fn), batch

    whole, least = check_against_eager(make)
    assert least.peak_bytes < whole.peak_bytes
    assert least.recomputed or least.leaving


def test_a_change_between_the_halves_is_refused():
    call, _, batch, model = compiled("mlp", None)
    loss = call(*batch)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_options_of_the_name():
    project = Path(__file__).parent.parent / "pyproject.toml"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]
    home, _, name = points["torch_dynamo_backends"]["mucudnn"].partition(":")
    compile_graph = getattr(importlib.import_module(home), name)
    if "mucudnn" not in torch._dynamo.list_backends():  # this is not installed
        torch._dynamo.register_backend(compile_graph, "mucudnn")
    model, loss_fn, batch = build("mlp")
    both = WithLoss(model, loss_fn)
    call = torch.compile(both, backend="mucudnn", options={"budget": "2MiB"})
    step(call, batch, model)
    for options, error, words in (
        ({"budget": 1024}, PlanningError, "least budget"),
        (
            {"bugdet": 1},
            ValueError,
            "unknown option 'bugdet'; choose one of: 'budget',",
        ),
        ({"budget": "much"}, ValueError, "not a size"),
        ({"budget": []}, TypeError, r"budget must be bytes, .*, got \[\]"),
    ):
        torch._dynamo.reset()
        call = torch.compile(both, backend="mucudnn", options=options)
        for _ in range(2):
            with pytest.raises(error, match=words):
                call(*batch)


def test_a_backend_without_parentheses():
    model, loss_fn, batch = build("mlp")
    call = torch.compile(WithLoss(model, loss_fn), backend=mt.backend)
    with pytest.raises(TypeError, match=r"backend=mt\.backend\(budget=\.\.\.\)"):
        call(*batch)


def test_an_assignment_to_data_is_refused_with_its_line():
    def forward(model, x):
        with torch.no_grad():
            model.second.weight.data = 0.9 * model.second.weight.data
        return model.first(x)

    call = torch.compile(Model(forward), backend=mt.backend(cache=None))
    words = r"to \.data of an input \(.*test_torch_backend_models\.py:\d+.*no_grad"
    with pytest.raises(UnsupportedError, match=words):
        call(torch.randn(2, WIDTH))
