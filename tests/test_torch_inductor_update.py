"""Compiled updates: the bits of the optimizer's own operations, and one kernel each."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():  # PyTorch's own, as its modules are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    from mucudnn.torch.inductor import kernel_graph, update
from torch import nn  # noqa: E402  (where there is PyTorch)
from torch.nn import functional  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from tests.test_torch_inductor import (  # noqa: E402, F401
    FxGraphCache,
    compilations,
    compiled_loop,
    one_thread_and_a_folder_of_its_own,
    pytestmark as marks,
    whole_loss,
)
from tests.torch_steps import least_bytes, real_peak  # noqa: E402

pytestmark = [*marks, pytest.mark.torch]

STEPS = 4


class Words(nn.Module):
    """An embedding that is also the last layer, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(37, 24)
        self.layers = nn.Sequential(
            nn.Linear(24, 51), nn.GELU(), nn.LayerNorm(51), nn.Linear(51, 24)
        )
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.layers(self.words(x))) @ self.words.weight.T


class Lion(torch.optim.Optimizer):
    """The optimizer of Chen et al. 2023, as users write it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                mean = state["mean"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(
                    mean.mul(one).add_(p.grad, alpha=1 - one).sign_(),
                    alpha=-group["lr"],
                )
                mean.mul_(two).add_(p.grad, alpha=1 - two)


def two_groups(model):
    first, *rest = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [first], "lr": 1e-2, "weight_decay": 0.0}, {"params": rest}]
    return torch.optim.AdamW(groups, 3e-3, weight_decay=0.1)


def of(kind, *args, **options):
    return lambda model: kind(model.parameters(), *args, **options)


optim = torch.optim
OPTIMIZERS = {
    "sgd": of(optim.SGD, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": of(optim.Adam, 1e-2, amsgrad=True, weight_decay=1e-2),
    "adamw": two_groups,
    "maximized": of(optim.AdamW, 1e-2, maximize=True),
    "rmsprop": of(optim.RMSprop, 1e-3, momentum=0.9, centered=True),
    "adagrad": of(optim.Adagrad, 1e-2),
    "adadelta": of(optim.Adadelta, 1.0),
    "nadam": of(optim.NAdam, 1e-2),
    "lion": lambda model: Lion(model.parameters()),
}


def one_cycle(optimizer):
    """A schedule of learning rates and of the decay of means."""
    return optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)


def halved(optimizer):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def loss_of(logits, y):
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def words(dtype=torch.float32):
    torch.manual_seed(0)
    batch = torch.randint(0, 37, (8, 12)), torch.randint(0, 37, (8, 12))
    return Words().to(dtype), batch


def same(one, other):
    """Whether nested values are equal, and tensors of one type."""
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def eager_update(model, batch, optimizer, clip=None, scheduler=None, steps=STEPS):
    """A loop over a compiled loss, with the optimizer's own operations."""
    loss = whole_loss(model, loss_of)
    step, losses = compiled_loop(model, loss, batch, optimizer, clip=clip), []
    for _ in range(steps):
        losses.append(step().item())
        if scheduler is not None:
            scheduler.step()
    return losses


@pytest.mark.parametrize(
    ("name", "dtype", "clip", "schedule"),
    [
        ("sgd", torch.float32, None, halved),
        ("adamw", torch.float32, 0.3, one_cycle),
        *(
            pytest.param(name, torch.float32, None, None, marks=pytest.mark.slow)
            for name in OPTIMIZERS
        ),
        pytest.param("adam", torch.float64, 0.3, None, marks=pytest.mark.slow),
    ],
)
def test_an_update_has_the_bits_of_its_operations(
    name, dtype, clip, schedule, monkeypatch
):
    model, batch = words(dtype)
    mine = copy.deepcopy(model)
    optimizer, other = OPTIMIZERS[name](mine), OPTIMIZERS[name](model)
    scheduler = schedule and schedule(optimizer)
    made = updates_of(monkeypatch)
    step = mt.train_step(
        mine, loss_of, optimizer, cache=None, inductor=True, clip_norm=clip
    )
    losses = []
    for _ in range(STEPS):
        losses.append(step(*batch).item())
        if scheduler is not None:
            scheduler.step()
    assert len(made[0]) == 7  # each trained parameter's
    assert losses == eager_update(
        model, batch, other, clip, schedule and schedule(other)
    )
    assert all(map(torch.equal, mine.parameters(), model.parameters()))
    assert same(optimizer.state_dict(), other.state_dict())


def test_an_update_that_changes_with_the_count_is_compiled_again(monkeypatch):
    model, batch = words()
    mine, steps = copy.deepcopy(model), 7
    optimizer, other = (optim.RAdam(m.parameters(), 1e-2) for m in (mine, model))
    made = updates_of(monkeypatch)
    step = mt.train_step(mine, loss_of, optimizer, cache=None, inductor=True)
    losses = [step(*batch).item() for _ in range(steps)]
    assert [len(nodes) for nodes in made] == [7, 7]  # without and with a rectification
    assert losses == eager_update(model, batch, other, steps=steps)


def updates_of(monkeypatch):
    """Return a list of the compiled updates of each step that is planned."""
    found = []
    inner = kernel_graph.compile_updates

    def compile_updates(*args):
        lowered = inner(*args)
        found.append([n for n in lowered.graph.nodes if n.op == "update"])
        return lowered

    monkeypatch.setattr(kernel_graph, "compile_updates", compile_updates)
    return found


def test_one_kernel_updates_parameters_of_all_shapes_and_decays(compilations):  # noqa: F811
    model, batch = words()
    step = mt.train_step(model, loss_of, two_groups(model), cache=None, inductor=True)
    FxGraphCache.clear()
    step(*batch)
    assert len(compilations) == 4  # both passes; updates with decay, and without


def images():
    """Weights of which one is not laid out as its gradient."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    model = model.to(memory_format=torch.channels_last)
    model[2].weight.data = model[2].weight.data.contiguous()
    return model, (torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "loss_fn", "name", "options", "count"),
    [
        (images, functional.cross_entropy, "sgd", {}, 6),
        (words, loss_of, "sgd", {"accumulate": 2}, 7),
        (words, loss_of, "sgd", {"scaler": torch.amp.GradScaler("cpu")}, 7),
        (lambda: words(torch.bfloat16), loss_of, "adamw", {}, 7),
        (lambda: words(torch.bfloat16), loss_of, "sgd", {}, 0),  # other bits: dropped
    ],
)
def test_layouts_sums_scales_and_types_have_the_bits_of_operations(
    made, loss_fn, name, options, count, monkeypatch
):
    updates = updates_of(monkeypatch)
    found = []
    for _ in range(2):
        model, batch = made()
        mine = {"cache": None, "inductor": True, **copy.deepcopy(options)}
        step = mt.train_step(model, loss_fn, OPTIMIZERS[name](model), **mine)
        losses = [step(*batch).item() for _ in range(STEPS)]
        found.append((losses, list(model.parameters())))
        monkeypatch.setattr(kernel_graph, "compile_updates", lambda one, *_: one)
    assert [len(nodes) for nodes in updates] == [count]
    assert same(*(list(each) for each in found))


def columns():
    """A large weight, laid out in columns, whose gradient has to be copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 96), nn.ReLU(), nn.Linear(96, 5))
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return model, (torch.randint(0, 64, (4, 1)), torch.randint(0, 5, (4, 1)))


@pytest.mark.parametrize(
    ("made", "options"), [(words, {}), (words, {"offload_state": True}), (columns, {})]
)
def test_tight_budgets_have_the_same_results_within_the_peak(made, options):
    def step_of(budget):
        model, batch = made()
        options_of = {"budget": budget, "cache": None, "inductor": True, **options}
        step = mt.train_step(model, loss_of, two_groups(model), **options_of)
        return step, batch

    step, batch = step_of(2000)
    budget = least_bytes(step.prepare, *batch)
    losses = []
    for step, batch in map(step_of, (None, budget)):
        losses.append([step(*batch).item() for _ in range(STEPS)])
        if not options:
            real = real_peak(lambda step=step, batch=batch: step(*batch))
            assert real + step.plan.resident_bytes <= step.plan.peak_bytes
    assert losses[0] == losses[1]
    assert step.plan.peak_bytes <= budget


def test_a_checkpoint_is_loaded_in_mid_training():
    model, batch = words()
    optimizer = two_groups(model)
    step = mt.train_step(model, loss_of, optimizer, cache=None, inductor=True)
    step(*batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    after = [step(*batch).item() for _ in range(STEPS)]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [step(*batch).item() for _ in range(STEPS)] == after


def test_a_kernel_with_other_bits_is_dropped(monkeypatch):
    monkeypatch.setitem(
        update._EXACT, torch.ops.aten.mul.Tensor, lambda x, y: x * y * 3
    )
    made = updates_of(monkeypatch)
    model, batch = words()
    step = mt.train_step(
        model, loss_of, OPTIMIZERS["sgd"](model), cache=None, inductor=True
    )
    step(*batch)
    assert made == [[]]
    assert step.plan.kernels


def test_a_rate_above_the_numbers_of_the_type_is_refused_as_by_eager_mode():
    model, batch = words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e39)
    step = mt.train_step(model, loss_of, optimizer, cache=None, inductor=True)
    with pytest.raises(RuntimeError, match="without overflow"):
        step(*batch)


def test_inductor_writes_products_as_before_once_updates_are_compiled():
    functions = [vars(o).get("fma") for o in (CppOverrides, CppVecOverrides)]
    with update._fused_products():
        assert vars(CppOverrides)["fma"] is not functions[0]
    assert functions == [vars(o).get("fma") for o in (CppOverrides, CppVecOverrides)]
