"""Steps of Inductor's kernels: the bits of `torch.compile`, in the bytes promised."""

import copy
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():  # PyTorch's own, as its modules are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.graph import GraphLowering

from torch import nn  # noqa: E402  (where there is PyTorch)
from torch.nn import functional  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from bench.torch import zoo  # noqa: E402
from mucudnn.torch.compile_backend import compile_graph  # noqa: E402
from tests.torch_calls import tuner  # noqa: E402
from tests.torch_step_cases import QUICK  # noqa: E402
from tests.torch_steps import build, least_bytes, real_peak  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("short_search"),
    # Of PyTorch's own modules, as Dynamo and Inductor import and trace them.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*profiling.*"),
    pytest.mark.filterwarnings("ignore:.*code generation for complex operators"),
]

STEPS = 3

OF_FUNCTIONS = [f"in_{n}" for n in ("complex_numbers", "windows_of_two_kinds")]
OF_FUNCTIONS += ["solved", "chosen", "in_a_larger_storage"]


@pytest.fixture(autouse=True)
def one_thread_and_a_folder_of_its_own(tmp_path_factory, monkeypatch):
    """What one test has compiled the next finds, and none finds what others left."""
    folder = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


class Branches(nn.Module):
    """Convolutions, statistics, a concatenation that two kernels write, and dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        z = functional.max_pool2d(torch.cat([y, self.second(y)], 1), 3, 2, 1)
        return self.head(self.drop(z.mean((2, 3))))


class UNet(nn.Module):
    """Two levels, with a skip by concatenation."""

    def __init__(self):
        super().__init__()

        def two(i, o):
            layers = []
            for a, b in ((i, o), (o, o)):
                layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
            return nn.Sequential(*layers)

        self.down, self.deep, self.up = two(3, 8), two(8, 16), two(16, 8)
        self.rise = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        skip = self.down(x)
        deep = self.deep(functional.max_pool2d(skip, 2))
        return self.head(self.up(torch.cat([skip, self.rise(deep)], 1)))


def branches():
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))
    return Branches(), functional.cross_entropy, batch


def unet():
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 32, 32), torch.randint(0, 5, (2, 32, 32))
    return UNet(), functional.cross_entropy, batch


def gpt():
    return build("gpt")


def llama():
    torch.manual_seed(0)
    sizes = zoo.GPTConfig(layers=2, width=32, heads=2, length=32, dropout=0.0)
    case = zoo.llama(4, sizes)
    return case.model, case.loss_fn, case.batch


def mlp():
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5)
    batch = torch.randn(64, 16), torch.randint(0, 5, (64,))
    return nn.Sequential(*layers), functional.cross_entropy, batch


def noisy():
    """Statistics of a batch, and dropout, in a perceptron."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)]
    layers += [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)]
    batch = torch.randn(256, 16), torch.randint(0, 5, (256,))
    return nn.Sequential(*layers), functional.cross_entropy, batch


def depthwise():
    """A convolution of each channel between two of all, as MobileNet has them."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Hardswish()]
    layers += [nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)]
    layers += [nn.Hardswish(), nn.Conv2d(16, 8, 1), nn.Flatten(), nn.Linear(2048, 5)]
    batch = torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))
    return nn.Sequential(*layers), functional.cross_entropy, batch


class Cached(nn.Module):
    """Attention to keys behind an empty cache, which `cat` lays out anew."""

    def __init__(self):
        super().__init__()
        self.project, self.head = nn.Linear(16, 16), nn.Linear(4, 5)

    def forward(self, x):
        heads = self.project(x).view(*x.shape[:2], 4, 4).transpose(1, 2)
        keys = torch.cat([x.new_zeros(0), heads], -2)
        return self.head((heads @ keys.transpose(2, 3) @ keys).mean((1, 2)))


def cached():
    torch.manual_seed(0)
    batch = torch.randn(2, 6, 16), torch.randint(0, 5, (2,))
    return Cached(), functional.cross_entropy, batch


class RandomDepth(nn.Module):
    """Two branches that are left out of samples at random, with the same rate."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        kept = [x.new_empty(len(x), 1).bernoulli_(0.8) for _ in range(2)]
        return self.second((x + self.first(x) * kept[0]) * kept[1])


def random_depth():
    torch.manual_seed(0)
    batch = torch.randn(32, 16), torch.randint(0, 5, (32,))
    return RandomDepth(), functional.cross_entropy, batch


class Drawing(nn.Module):
    """Numbers of several distributions, some of them for images channels last."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        images = self.first(x).view(-1, 4, 2, 2).to(memory_format=torch.channels_last)
        factors = torch.empty_like(images).exponential_() * torch.randn_like(images)
        images = functional.dropout(images, 0.2) * factors
        return self.second(torch.normal(images.flatten(1), torch.rand(len(x), 16)))


def drawing():
    torch.manual_seed(0)
    batch = torch.randn(8, 16), torch.randint(0, 5, (8,))
    return Drawing(), functional.cross_entropy, batch


class Factored(nn.Linear):
    """A factorization, whose check fails for most matrices."""

    def forward(self, x):
        y = super().forward(x)
        return torch.linalg.cholesky(y.T @ y + torch.eye(4)).mean(1)


def factored():
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(4)
    return Factored(6, 4), functional.mse_loss, batch


class Selecting(nn.Linear):
    """A layer that is given no rows, too."""

    def forward(self, x):
        y = super().forward(x)
        return y, super().forward(y[:0].relu()).square().sum()


def selecting():
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8, 6)
    return Selecting(6, 6), lambda out, y: (out[0] - y).square().mean() + out[1], batch


class Shifted(nn.Linear):
    """A number added to the loss, whose gradient is the loss's."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return super().forward(x).square().mean(), self.shift


def shifted(trained=True):
    torch.manual_seed(0)
    model = Shifted(6, 4)
    for parameter in (model.weight, model.bias):
        parameter.requires_grad_(trained)
    batch = torch.randn(8, 6), torch.randn(1)
    return model, lambda out, y: out[0] * y.mean() + out[1], batch


def shifted_only():
    """A backward half without kernels."""
    return shifted(trained=False)


def case(name):
    torch.manual_seed(0)
    return QUICK[name]()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-3)


@contextmanager
def rounded_roots():
    """Have roots of eager mode rounded correctly, which those of Intel MKL are not."""
    root = torch.Tensor.sqrt

    def sqrt(x):
        if x.dtype is torch.float64:
            return torch.from_numpy(np.sqrt(x.numpy()))
        return root(x.double()).to(x.dtype)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "sqrt", sqrt)
        patched.setattr(torch.Tensor, "sqrt_", lambda x: x.copy_(sqrt(x)))
        yield


@dataclass
class Trained:
    """What a few steps gave, and the loop that goes on."""

    losses: list
    state: list
    step: object


def trained(model, step):
    torch.manual_seed(1)
    losses = [step().item() for _ in range(STEPS)]
    state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return Trained(losses, state, step)


def compiled_loop(
    model, loss_of, batch, optimizer, *, parts=1, clip=None, scaler=None, cast=False
):
    """A step by hand, of a compiled loss of the batch, in parts or scaled."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)

    def step():
        optimizer.zero_grad()
        total = 0
        for part in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                loss = loss_of(*part)
            loss = loss / parts if parts > 1 else loss
            scaler.scale(loss).backward()
            total = total + loss.detach()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        with rounded_roots():
            scaler.step(optimizer)
        scaler.update()
        return total

    return step


def whole_loss(model, loss_fn):
    return torch.compile(lambda x, y: loss_fn(model(x), y), fullgraph=True)


def compiled(made, optimizer_of, backend=None, **options):
    """Train by `torch.compile`: with its loss, or the model by a backend."""
    model, loss_fn, batch = made()
    if backend is None:
        loss_of = whole_loss(model, loss_fn)
    else:
        forward = torch.compile(model, backend=backend, fullgraph=True)
        loss_of = lambda x, y: loss_fn(forward(x), y)  # noqa: E731
    optimizer = optimizer_of(model)
    return trained(model, compiled_loop(model, loss_of, batch, optimizer, **options))


def planned(made, optimizer_of, budget=None, **options):
    """Train by a planned step; also return its plan."""
    model, loss_fn, batch = made()
    options = {"cache": None, "inductor": True, **options}
    step = mt.train_step(model, loss_fn, optimizer_of(model), budget=budget, **options)
    found = trained(model, lambda: step(*batch))
    return found, step


def least_of(made, optimizer_of):
    model, loss_fn, batch = made()
    step = mt.train_step(
        model, loss_fn, optimizer_of(model), budget=2000, cache=None, inductor=True
    )
    return least_bytes(step.prepare, *batch)


@pytest.fixture
def compilations(monkeypatch):
    """Count the graphs that Inductor compiles anew."""
    found = []
    inner = GraphLowering.compile_to_module

    def counted(self):
        found.append(self)
        return inner(self)

    monkeypatch.setattr(GraphLowering, "compile_to_module", counted)
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("made", "optimizer_of"),
    [
        (branches, sgd),
        pytest.param(gpt, adamw, marks=SLOW),
        pytest.param(llama, sgd, marks=SLOW),
        pytest.param(unet, sgd, marks=SLOW),  # which the next test finds compiled
    ],
)
def test_budgets_of_one_compilation_have_the_bits_of_torch_compile(
    made, optimizer_of, compilations
):
    # Other tests compile the same graphs, which would be found on disk. Their kernels
    # may be: these are not counted.
    FxGraphCache.clear()
    expected = compiled(made, optimizer_of)
    compilations.clear()
    free, step = planned(made, optimizer_of)
    plans = [step.plan]
    runs = [(free, step)]
    least, most = least_of(made, optimizer_of), step.plan.peak_bytes
    for share in (0.4, 0.0):
        budget = int(least + share * (most - least))
        runs.append(planned(made, optimizer_of, budget))
        plans.append(runs[-1][1].plan)
        assert plans[-1].peak_bytes <= budget
    assert len(compilations) == 3  # forward, backward and update, once
    reals = []
    for found, step in runs:
        assert found.losses == expected.losses
        assert all(map(torch.equal, found.state, expected.state))
        reals.append(real_peak(found.step) + step.plan.resident_bytes)
        slack = 0.01 * step.plan.peak_bytes + (1 << 15)  # allocations are rounded up
        assert step.plan.peak_bytes - slack <= reals[-1] <= step.plan.peak_bytes
    for peaks in ([plan.peak_bytes for plan in plans], reals):
        assert peaks == sorted(peaks, reverse=True)
    assert plans[0].kernels > 4
    assert f"{plans[0].kernels} kernels of Inductor" in str(plans[0])
    assert plans[-1].recomputed or plans[-1].leaving


@pytest.mark.parametrize(
    "made",
    [
        cached,
        random_depth,
        factored,
        selecting,
        shifted,
        shifted_only,
        *(partial(case, name) for name in OF_FUNCTIONS),
    ],
)
def test_what_functions_read_and_return_is_known(made):
    expected = compiled(made, sgd)
    found, step = planned(made, sgd)
    assert step.plan.kernels
    assert found.losses == expected.losses
    assert all(map(torch.equal, found.state, expected.state))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["partitioner", "images_last", "operands"])
def test_settings_of_pytorch_apply_to_a_planned_step(setting, tmp_path):
    made, settings = {
        "partitioner": (noisy, functorch_config.patch(activation_memory_budget=0.5)),
        "images_last": (depthwise, config.patch(force_layout_optimization=True)),
        "operands": (
            depthwise,
            functorch_config.patch(ban_recompute_materialized_backward=False),
        ),
    }[setting]
    default, step = planned(made, sgd, cache=tmp_path)
    with settings:
        expected = compiled(made, sgd)
        free, free_step = planned(made, sgd, cache=tmp_path)
        budget = int(0.8 * free_step.plan.peak_bytes)
        within, other = planned(made, sgd, budget, cache=tmp_path)
    if setting == "partitioner":
        assert default.losses != expected.losses  # random numbers in another order
    plan, plain = free_step.plan, step.plan
    assert (plan.kernels, plan.peak_bytes) != (plain.kernels, plain.peak_bytes)
    for found in (free, within):
        assert found.losses == expected.losses
        assert all(map(torch.equal, found.state, expected.state))
    assert other.plan.peak_bytes <= budget


@pytest.mark.slow
def test_a_tuner_plans_the_convolutions_of_a_compiled_step():
    expected = compiled(unet, sgd)
    free, free_step = planned(unet, sgd, tuner=tuner(native=True))
    budget = int(0.8 * free_step.plan.peak_bytes)
    found, step = planned(unet, sgd, budget, tuner=tuner(native=True))
    for run, plan in ((free, free_step.plan), (found, step.plan)):
        assert len(plan.convolutions) > 6
        assert plan.kernels > len(plan.convolutions)
        assert run.losses == pytest.approx(expected.losses, rel=1e-4)
    assert real_peak(found.step) + step.plan.resident_bytes <= step.plan.peak_bytes


@pytest.mark.parametrize("budget", [None, "240KiB"])
def test_a_compiled_model_keeps_a_budget_with_the_same_bits(budget):
    backend = mt.backend(budget=budget, inductor=True, cache=None)
    found = compiled(branches, sgd, backend)
    expected = compiled(branches, sgd, "inductor")
    assert backend.plans[0].kernels > 4
    assert found.losses == expected.losses
    assert all(map(torch.equal, found.state, expected.state))


def test_backward_kernels_read_what_tensors_were_in_the_forward_pass():
    """As a queue of keys; torch.compile recomputes from the new values (2.13)."""

    def gradient(backend):
        torch.manual_seed(0)
        layer, keys = nn.Linear(4, 3), torch.randn(3, 5)

        def loss(x):
            scores = layer(x) @ keys.clone()
            keys.mul_(2)
            return scores.square().sum()

        torch.compile(loss, backend=backend)(torch.randn(6, 4)).backward()
        return layer.weight.grad

    backend = mt.backend(inductor=True, cache=None)
    assert torch.allclose(gradient(backend), gradient("eager"))
    assert backend.plans[0].kernels


def test_what_is_not_compiled_runs_operation_by_operation_and_says_why():
    apart, _ = planned(branches, sgd, inductor=False)
    missing = {"cpp.cxx": ("no-such-compiler",)}
    with config.patch(missing), pytest.warns(UserWarning, match="install g\\+\\+"):
        found, step = planned(branches, sgd)
    assert found.losses == apart.losses
    assert step.plan.kernels == 0
    model, loss_fn, (x, y) = branches()
    forward = torch.compile(model, backend=mt.backend(inductor=True, cache=None))
    expected = copy.deepcopy(model)
    torch.manual_seed(1)
    with config.patch(missing), pytest.warns(UserWarning, match="install g\\+\\+"):
        loss = loss_fn(forward(x), y)
    torch.manual_seed(1)
    assert torch.equal(
        loss, loss_fn(torch.compile(expected, backend="aot_eager")(x), y)
    )


def test_kernels_read_numbers_that_change():
    class Scaled(nn.Linear):
        rate = 1.0

        def forward(self, x):
            return super().forward(x) * self.rate

    found = []
    for plans in (False, True):
        torch.manual_seed(0)
        model, batch = Scaled(8, 4), (torch.randn(6, 8), torch.randn(6, 4))
        loss_fn, optimizer = functional.mse_loss, sgd(model)
        step = mt.train_step(model, loss_fn, optimizer, inductor=True, cache=None)
        loop = compiled_loop(model, whole_loss(model, loss_fn), batch, optimizer)
        losses = []
        for model.rate in (1.0, 0.5, 0.25, 0.7, 0.3):
            losses.append((step(*batch) if plans else loop()).item())
        found.append((losses, model.weight.tolist()))
    assert step.plan.kernels
    assert found[0] == found[1]


def test_results_may_be_views_of_a_part_of_a_tensor():
    class Turned(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean(), x.t()

    model, x = Turned(4, 3), torch.randn(10, 4)[2:]
    step = mt.train_step(model, lambda y: y, sgd(model), inductor=True, cache=None)
    assert torch.equal(step(x)[1], x.t())
    assert step.plan.kernels


def test_a_compiled_step_stores_its_detached_weights():
    class Storing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.stored = nn.Linear(4, 2), None

        def forward(self, x):
            self.stored = self.layer.weight.detach()
            return self.layer(x)

    model = Storing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, functional.mse_loss, optimizer, inductor=True)
    step(torch.randn(3, 4), torch.randn(3, 2))
    assert torch.equal(model.stored, model.layer.weight)
    assert not model.stored.requires_grad


def test_what_cannot_be_compiled_runs_operation_by_operation():
    """PyTorch's model of grouped products takes no float32."""
    model, loss_fn, batch = QUICK["grouped_products"]()
    losses = []
    for inductor in (False, True):
        mine = copy.deepcopy(model)
        step = mt.train_step(mine, loss_fn, sgd(mine), inductor=inductor, cache=None)
        says = "operation by operation: .*Inductor cannot trace"
        with pytest.warns(UserWarning, match=says) if inductor else nullcontext():
            losses.append([step(*batch).item() for _ in range(STEPS)])
    assert losses[0] == losses[1]


def test_a_number_that_changes_is_told_with_its_line():
    class Scaled(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y * y.detach().sum().item()

    class Averaged(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x)

    for model in (Scaled(4, 4), nn.Sequential(Averaged(4, momentum=None))):
        step = mt.train_step(model, functional.mse_loss, sgd(model), inductor=True)
        x = torch.randn(6, 4)
        says = r"from step to step \(.*test_torch_inductor.*, in forward\)"
        with pytest.warns(UserWarning, match=says):
            step(x, x)


def test_a_batch_that_is_not_compiled_leaves_others_compiled():
    class Scaled(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y * x.sum().item() if len(x) == 8 else y

    model = Scaled(4, 4)
    step = mt.train_step(
        model, functional.mse_loss, sgd(model), inductor=True, cache=None
    )
    kernels = []
    for size in (6, 8, 5):
        x = torch.randn(size, 4)
        says = pytest.warns(UserWarning, match=r"\[8, 4\].* operation by operation")
        with says if size == 8 else nullcontext():
            step(x, x)
        kernels.append(step.plan.kernels)
    assert kernels[0]
    assert kernels[1] == 0
    assert kernels[2]


def test_accumulated_gradients_are_those_of_a_loop_over_a_compiled_model():
    expected = compiled(noisy, sgd, parts=2)
    free, free_step = planned(noisy, sgd, accumulate=2)
    budget = int(0.9 * free_step.plan.peak_bytes)
    found, tight_step = planned(noisy, sgd, budget, accumulate=2)
    assert tight_step.plan.kernels > 8
    for run in (free, found):
        assert run.losses == expected.losses
        assert all(map(torch.equal, run.state, expected.state))
    assert real_peak(found.step) + tight_step.plan.resident_bytes <= budget


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "scaler", "autocast", "lbfgs"])
def test_clipping_scaling_casts_and_own_updates_are_those_of_a_compiled_loop(kind):
    def optimizer_of(model):
        if kind == "lbfgs":
            return torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
        return torch.optim.Adam(model.parameters(), 1e-2)

    def by_closure():
        model, loss_fn, batch = mlp()
        optimizer, loss_of = optimizer_of(model), whole_loss(model, loss_fn)

        def passes():
            optimizer.zero_grad()
            loss = loss_of(*batch)
            loss.backward()
            return loss

        return trained(model, lambda: optimizer.step(passes))

    scalers = [torch.amp.GradScaler("cpu", enabled=kind == "scaler") for _ in range(2)]
    clip, cast = 0.5 if kind == "clip" else None, kind == "autocast"
    if kind == "lbfgs":
        expected = by_closure()
    else:
        options = {"clip": clip, "scaler": scalers[0], "cast": cast}
        expected = compiled(mlp, optimizer_of, **options)
    options = {"clip_norm": clip, "scaler": scalers[1]}
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        found, step = planned(mlp, optimizer_of, **options)
    assert step.plan.kernels
    assert found.losses == expected.losses
    assert all(map(torch.equal, found.state, expected.state))


def recurrent():
    torch.manual_seed(0)
    model = Recurrent()
    return model, functional.mse_loss, (torch.randn(4, 6, 8), torch.randn(4, 6, 3))


class Recurrent(nn.Module):
    """PyTorch's kernels of an LSTM make a workspace, which backward then spoils."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(functional.gelu(self.lstm(x)[0]))


def test_an_lstm_is_compiled_within_a_budget():
    model, loss_fn, batch = recurrent()
    loop = compiled_loop(model, lambda x, y: loss_fn(model(x), y), batch, sgd(model))
    eager = trained(model, loop)
    found, _ = planned(recurrent, sgd)
    tight, step = planned(recurrent, sgd, least_of(recurrent, sgd))
    assert step.plan.kernels
    assert tight.losses == found.losses
    assert all(map(torch.equal, tight.state, found.state))
    torch.testing.assert_close(found.state, eager.state)


@pytest.mark.parametrize(
    "made",
    [
        drawing,
        *(pytest.param(made, marks=pytest.mark.slow) for made in (branches, noisy)),
    ],
)
def test_a_compiled_step_with_dropout_is_verified_against_eager_mode(made):
    # A difference from eager mode would raise VerificationError.
    _, step = planned(made, sgd, verify=1)
    assert step.plan.kernels


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"inductor": "on"}, TypeError, "inductor must be True or False"),
        ({"fused": True}, ValueError, "one of: 'budget', 'tuner', 'inductor', "),
    ],
)
def test_options_of_torch_compile_are_checked(options, error, says):
    refuses = compile_graph(
        torch.fx.symbolic_trace(nn.Linear(2, 2)), (), options=options
    )
    with pytest.raises(error, match=says):
        refuses(torch.ones(1, 2))
