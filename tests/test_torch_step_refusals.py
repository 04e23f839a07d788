"""What a step cannot have is refused: which operation, which line, what to do."""

import copy
import inspect
import logging
import pickle
import re
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import mucudnn.torch as mt
from mucudnn.errors import UnsupportedError
from tests.torch_step_cases import Whole

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*profiling.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def nonzero(s, x):
    y = s.m[0](x)
    return y[y.sum(1).nonzero().squeeze(1)].sum()  # LINE


def selected(s, x):
    y = s.m[0](x)
    return y.masked_select(y > 0).sum()  # LINE


def indexed(s, x):
    y = s.m[0](x)
    return y[y > 0].sum()  # LINE


def decided(s, x):
    y = s.m[0](x)
    if float(y.detach().sum()) > 0:  # LINE
        return y.sum() * 2
    return y.sum()


def doubled_if_large(y):
    return y * 2 if bool(y.sum() > 0) else y


def scripted(s, x):
    return torch.jit.script(doubled_if_large)(s.m[0](x)).sum()  # LINE


def exported(s, x):
    torch.export.export(nn.ReLU(), (torch.zeros(2),))  # LINE
    return s.m[0](x).sum()


def infinite(s, x):
    most = max(-float("inf"), x.max().item())  # LINE
    return s.m[0](x).sum() * most


def by_chance(s, x):
    y = s.m[0](x)
    if torch.rand(()) < 0.5:  # LINE
        return y.sum() * 2
    return y.sum()


def as_number(s, x):
    return s.m[0](x).sum() * float(x.detach().numpy().mean())  # LINE


def as_list(s, x):
    return s.m[0](x).sum() * x.tolist()[0][0]  # LINE


def sparse(s, x):
    return torch.sparse.mm(torch.eye(4).to_sparse(), s.m[0](x)).sum()  # LINE


def nested(s, x):
    return s.m[0](x).sum() * torch.nested.nested_tensor([x[0], x[1]]).sum()  # LINE


def quantized(s, x):
    q = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)  # LINE
    return (q.dequantize() * s.m[0](x)).sum()


def own_generator(s, x):
    g = torch.Generator().manual_seed(3)
    return (s.m[0](x) + torch.rand(4, 8, generator=g)).sum()  # LINE


def seeded(s, x):
    with torch.random.fork_rng():  # LINE
        torch.manual_seed(3)  # LINE
        noise = torch.rand(4, 8)
    return (s.m[0](x) + noise).sum()


HELD = torch.ones(8)


def elsewhere(s, x):
    HELD.add_(1.0)  # LINE
    return (s.m[0](x) * HELD).sum()


def branched(s, x):
    y = s.m[0](x)
    return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)).sum()  # LINE


def elsewhere_by_a_view(s, x):
    HELD[2:].add_(1.0)  # LINE
    return (s.m[0](x) * HELD).sum()


def text_of_a_number(s, x):
    y = s.m[0](x).sum()
    return y * len(f"{y.item():.3f}")  # LINE


def formatted_tensor(s, x):
    y = s.m[0](x).sum()
    return y * len(f"{y:.3f}")  # LINE


def text_of_a_tensor(s, x):
    return s.m[0](x).sum() * len(str(x))  # LINE


def class_of_a_tensor(s, x):  # LINE
    if type(x) not in (torch.Tensor, list):
        raise TypeError
    return s.m[0](x).sum()


def statistics_in_part(s, x):
    y = s.m[0](x)
    return nn.functional.batch_norm(y, None, HELD, training=True).sum()  # LINE


def mean_of_nothing(s, x):
    y = s.m[0](x)[:0]
    (g,) = torch.autograd.grad(nn.functional.mse_loss(y, y * 2), s.m[0].bias)  # LINE
    return (s.m[0](x) * g).sum()


def jagged(s, x):
    parts = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)  # LINE
    return s.m[0](parts).values().sum()


@torch.library.custom_op("mucudnn_tests::tripled_in_place", mutates_args={"x"})
def tripled(x: torch.Tensor) -> None:
    x.mul_(3)


def written_by_an_operation(s, x):
    y = s.m[0](x).detach()
    tripled(y)  # LINE
    return (s.m[0](x) * y).sum()


class CosineByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.from_numpy(np.cos(x.numpy()))  # LINE


def gradient_by_numpy(s, x):
    return CosineByNumpy.apply(s.m[0](x)).sum()


def linearized(s, x):
    y, times = torch.func.linearize(torch.tanh, s.m[0](x))  # LINE
    return (y * times(x)).sum()


class Marked(torch.Tensor):
    pass


def marked(s, x):
    return (s.m[0](x) * HELD.as_subclass(Marked)).sum()  # LINE


def numbers_in_a_tensor(s, x):
    y = s.m[0](x)
    return torch._foreach_addcmul([y], [y], [y], HELD[:1])[0].sum()  # LINE


def written_by_a_conjugate(s, x):
    y = torch.complex(s.m[0](x), x) * 1
    parts = torch.view_as_real(y)
    y.conj().add_(1)
    return parts.mul_(2).sum()  # LINE


AT_LINES = {
    text_of_a_number: r"writes a number or tensor as text.*what the step returns",
    formatted_tensor: r"writes a number or tensor as text.*what the step returns",
    text_of_a_tensor: r"writes a number or tensor as text.*what the step returns",
    class_of_a_tensor: r"compares the class of a tensor.*isinstance",
    statistics_in_part: r"cannot be captured.*running_mean.*outside the step",
    mean_of_nothing: r"cannot be captured.*division by zero.*outside the step",
    jagged: r"cannot be captured.*not tracked.*outside the step",
    marked: r"cannot be captured.*a tensor subclass",
    linearized: r"calls linearize\(\).*torch.func.jvp",
    written_by_an_operation: r"modifies its operands.*return new tensors",
    gradient_by_numpy: r"cannot be captured.*numpy.*outside the step",
    infinite: r"cannot be captured.*NaN.*outside the step",
    numbers_in_a_tensor: r"cannot be captured.*scalars to be on CPU.*outside the step",
    written_by_a_conjugate: r"cannot be captured.*conjugated.*outside the step",
    nonzero: r"aten\.nonzero.*torch\.where",
    selected: r"aten\.masked_select.*torch\.where",
    indexed: r"aten\.index\.Tensor.*torch\.where",
    decided: r"branches on the value of a tensor.*torch\.where.*no float",
    scripted: r"branches on the value of a tensor.*torch\.where",
    exported: r"captures operations itself.*torch\.export.*outside the step",
    by_chance: r"branches on the value of a tensor.*torch\.where",
    as_number: r"calls numpy.*keep them in tensors",
    as_list: r"calls tolist.*keep them in tensors",
    sparse: r"_to_sparse.*use dense",
    nested: r"nested.*padding",
    quantized: r"quantize_per_tensor.*fake quantization",
    own_generator: r"its own random generator",
    seeded: r"reads or sets the state of PyTorch's generator",
    branched: r"calls cond.*torch\.where",
    elsewhere_by_a_view: r"modifies a tensor that is not a parameter or buffer",
    elsewhere: r"modifies a tensor that is not a parameter or buffer",
}


def step_of(model, loss_fn=lambda out: out, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return mt.train_step(model, loss_fn, optimizer, **options)


@pytest.mark.parametrize("forward", AT_LINES, ids=lambda f: f.__name__)
def test_the_users_line_is_named(forward):
    state, values = torch.get_rng_state(), HELD.clone()
    model = Whole(forward, nn.Linear(8, 8))
    with pytest.raises(UnsupportedError, match=AT_LINES[forward]) as caught:
        step_of(model, budget="1GiB")(torch.randn(4, 8))
    source = Path(__file__).read_text().splitlines()
    file, line = re.search(r"\((\S+):(\d+), in", str(caught.value)).groups()
    assert Path(file) == Path(__file__)
    assert "# LINE" in source[int(line) - 1]
    assert torch.equal(HELD, values)
    assert state.shape == torch.get_rng_state().shape


def test_what_is_refused_runs_in_eager_mode_afterwards():
    step = step_of(Whole(branched, nn.Linear(8, 8)), fallback="eager")
    x = torch.randn(4, 8)
    with pytest.warns(UserWarning, match="eager mode: the step calls cond"):
        step(x)
    step(x)


def test_an_error_of_a_batch_is_raised_and_not_logged_as_well(caplog):
    with pytest.raises(RuntimeError, match="same reduction dim"):
        step_of(nn.Linear(4, 4), torch.sum, budget="1GiB")(torch.randn(2, 5))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def printing(out, y):
    print("a loss")  # noqa: T201
    return nn.functional.mse_loss(out, y)


def log_something(out, y):
    logging.getLogger("own").warning("a loss")
    return nn.functional.mse_loss(out, y)


@pytest.mark.parametrize("loss", [printing, log_something])
def test_what_a_step_prints_only_when_it_is_captured_is_announced(loss):
    model = nn.Linear(4, 2)
    step = mt.train_step(model, loss, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(UserWarning, match=rf"prints or logs .*in {loss.__name__}"):
        step(torch.randn(3, 4), torch.randn(3, 2))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.LayerNorm(4)], ids=repr)
def test_what_a_checkpoint_changes_twice_in_eager_mode_is_announced(norm):
    def forward(s, x):
        return checkpoint(s.m[0], x, use_reentrant=False).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_of(Whole(forward, norm))(torch.randn(3, 4))
    said = [w for w in caught if "checkpoint changes buffer" in str(w.message)]
    assert len(said) == isinstance(norm, nn.BatchNorm1d)


def test_batches_and_parameters_that_are_not_trained_with_are_announced():
    model, ones = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.warns(UserWarning, match="computed with gradients"):
        step_of(nn.Linear(4, 4), torch.Tensor.sum)(model(ones))
    step = step_of(model, torch.Tensor.sum)
    step(ones)
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.warns(UserWarning, match="do not update 2 .* create a new optimizer"):
        step(ones)
    batch = torch.nested.nested_tensor([ones, torch.ones(3, 4)], layout=torch.jagged)
    with pytest.warns(UserWarning, match="eager mode: the batch has a nested tensor"):
        step_of(nn.Linear(4, 4), lambda out: out.values().sum())(batch)


def test_a_capture_does_not_see_what_other_threads_read():
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    captures, finished = threading.Event(), threading.Event()
    others_optimizer = torch.optim.AdamW(other.parameters())
    errors = []

    def read_own_state():
        try:
            other(torch.ones(3, 4)).sum().backward()
            others_optimizer.step()
        except UnsupportedError as e:
            errors.append(e)
        finished.set()

    def start_a_thread():
        captures.wait(60)
        threading.Thread(target=read_own_state).start()

    def loss(out, y):
        captures.set()
        finished.wait(60)
        return nn.functional.mse_loss(out, y)

    threading.Thread(target=start_a_thread).start()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, loss, optimizer)
    step(torch.randn(3, 4), torch.randn(3, 2))
    assert not errors


NAN, INF = float("nan"), float("inf")

WRONG = {
    "budget": (TypeError, (b"1GiB", [1], True, {}), ValueError, (NAN, -INF, -0.5, "x")),
    "cache": (TypeError, (3, b"x", True), ValueError, ("", "\0")),
    "inductor": (TypeError, ("no", 1, None)),
    "offload_state": (TypeError, ("no", 1, None)),
    "offload": (TypeError, ("no", 1, None)),
    "tiers": (TypeError, (None, 3, b"host", [3]), ValueError, ("moon", ["host"] * 2)),
    "tuner": (TypeError, ("fast", 3, True)),
    "split": (TypeError, (None, 1.5, True, [2]), ValueError, ("width", 0, -1)),
    "accumulate": (TypeError, ("2", None, 1.5, True), ValueError, (0, -1)),
    "max_plans": (TypeError, ("3", None, NAN, 1.5, True), ValueError, (0, -1)),
    "clip_norm": (TypeError, ("1", [1.0], True), ValueError, (0.0, -1.0, NAN)),
    "clip_value": (TypeError, ("1", [1.0], True), ValueError, (0.0, -1.0, NAN)),
    "scaler": (TypeError, (2.0, "on", True)),
    "model": (TypeError, (None, "net", len, nn.Linear)),
    "loss_fn": (TypeError, (None, "mse", 3, nn.MSELoss)),
    "optimizer": (
        *(TypeError, (None, "adam", torch.optim.SGD)),
        *(ValueError, (torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1),)),
    ),
    "verify": (TypeError, (True, 1.0, "2"), ValueError, (-1,)),
    "exact": (TypeError, (1.5, "yes")),
    "fallback": (TypeError, (3,), ValueError, ("wait",)),
    "example": (TypeError, (None, torch.ones(2), (), "xy", 3)),
    "device": (TypeError, (None, 3, ["h200"]), ValueError, ("abacus", "")),
    "batch": (TypeError, (None, "12", 1.5, True), ValueError, (0, -1)),
    "at_least": (TypeError, (None, "1", True), ValueError, (0,)),
    "batch_norm": (TypeError, (None, 3), ValueError, ("some",)),
    "reduction": (TypeError, (None, 3), ValueError, ("some",)),
    "table": (TypeError, ("fast", 3)),
    "memory": (TypeError, ("1GiB", True, 1.5), ValueError, (0, -1)),
    "count": (TypeError, (None, 3)),
    "wrap": (TypeError, (None, 3)),
    "workspace_limit": (
        *(TypeError, (b"1", [1], True, NAN)),
        *(ValueError, (-1, "x")),
    ),
}
"""By argument: a kind of error and what it is raised for, perhaps another."""

STEP = ("model", "loss_fn", "optimizer")
TAKES = {
    "train_step": (
        *(*STEP, "budget", "tuner", "cache", "offload_state", "accumulate", "split"),
        *("clip_norm", "clip_value", "scaler", "max_plans", "inductor", "tiers"),
        *("verify", "exact", "fallback"),
    ),
    "backend": ("budget", "tuner", "cache", "inductor", "tiers"),
    "memory": (
        *(*STEP, "example", "device", "accumulate", "offload_state", "split", "tiers"),
    ),
    "distribute": (
        *("model", "batch", "at_least", "batch_norm", "reduction", "table"),
        *("memory", "count", "wrap"),
    ),
    "convolutions": ("workspace_limit", "tuner"),
}


@pytest.mark.parametrize(
    ("face", "name"), [(face, name) for face, names in TAKES.items() for name in names]
)
def test_arguments_are_checked_where_they_are_given(face, name):
    model = nn.Linear(2, 2)
    right = {
        "model": model,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "example": (torch.ones(2, 2), torch.ones(2, 2)),
        "batch": 4,
    }
    taken = inspect.signature(getattr(mt, face)).parameters
    right = {key: value for key, value in right.items() if key in taken}
    rows = WRONG[name]
    for error, values in zip(rows[::2], rows[1::2], strict=True):
        for value in values:
            with pytest.raises(error) as refused:
                getattr(mt, face)(**{**right, name: value})
            words = str(refused.value)
            # A size, a tier and a way to split are named by what they are.
            assert re.search(name.rstrip("s") + "|size|is split", words), words
            assert len(words) < 500


def test_arguments_that_torch_takes_are_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for taken in (
        {"clip_norm": INF, "clip_value": INF},
        {"budget": INF, "accumulate": np.int64(2)},
        {"budget": np.float64(1e9), "max_plans": np.int64(1)},
        {"cache": Path("~/cache"), "offload_state": np.bool_(True)},
    ):
        step = mt.train_step(model, nn.functional.mse_loss, optimizer, **taken)
        assert isinstance(step, mt.TrainStep)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_wrapped_models_are_refused_by_name():
    model = nn.DataParallel(nn.Linear(4, 1))
    with pytest.raises(UnsupportedError, match="DataParallel"):
        step_of(model)(torch.randn(2, 4))
    for name, words in {
        "DistributedDataParallel": r"train_step\(DistributedDataParallel\(model",
        "FullyShardedDataParallel": "fully_shard",
    }.items():
        model = nn.Sequential(type(name, (nn.Linear,), {})(4, 1))
        with pytest.raises(UnsupportedError, match=f"has a {name}, .*{words}"):
            step_of(model)
    model = torch.compile(nn.Linear(4, 1), backend="eager")
    with pytest.raises(UnsupportedError, match=r"compiled by torch\.compile"):
        step_of(model)(torch.randn(2, 4))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    with pytest.raises(UnsupportedError, match="weight of the model is a TwoTensor"):
        step_of(model)
    model = nn.Sequential(torch.jit.trace(nn.Linear(4, 1), torch.randn(2, 4)))
    with pytest.raises(UnsupportedError, match=r"scripted module \(Linear\)"):
        step_of(model)(torch.randn(2, 4))


def test_what_is_made_in_inference_mode_is_named():
    model = nn.Linear(4, 1)
    with torch.inference_mode():
        x, other = torch.rand(3, 4), nn.Linear(4, 1)
    for one, batch in ((model, x), (other, torch.rand(3, 4))):
        with pytest.raises(UnsupportedError, match="created within torch"):
            step_of(one, torch.sum)(batch)
    step_of(model, torch.sum)(x.clone())


def test_inference_mode_and_disabled_gradients_are_named():
    model, x = nn.Linear(4, 1), torch.randn(2, 4)
    step = step_of(model, torch.sum)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for call in (step, step, lambda x: mt.memory(model, torch.sum, (x,), optimizer)):
        with torch.inference_mode(), pytest.raises(UnsupportedError, match="inference"):
            call(x)
        step(x)
        step = step_of(model, torch.sum)
        with torch.no_grad(), pytest.raises(UnsupportedError, match="gradients disab"):
            step(x)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_steps_are_neither_copied_nor_pickled(how):
    step = step_of(nn.Linear(4, 1), torch.sum)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"state_dict.*train_step"):
            how(step)
        step(torch.randn(2, 4))


class Kernel(torch._ops.HigherOrderOperator):
    """Stands for the one that PyTorch calls a Triton kernel by, which needs Triton."""

    def __init__(self):
        super().__init__("mucudnn_tests_kernel")

    def __call__(self, x):
        return super().__call__(x)


KERNEL = Kernel()


@torch.library.triton_op("mucudnn_tests::by_kernel", mutates_args={})
def by_kernel(x: torch.Tensor) -> torch.Tensor:
    return KERNEL(x)


def test_what_no_step_can_have_is_refused():
    step = step_of(nn.Linear(4, 4), torch.Tensor.sum)
    inner = Whole(lambda s, x: s.m[0](x).sum() + step(x), nn.Linear(4, 4))
    kernel = Whole(lambda s, x: by_kernel(s.m[0](x)).sum(), nn.Linear(4, 4))
    fake = nn.Sequential(nn.Linear(4, 4), FakeQuantize())
    ones = torch.ones(2, 4)
    for model, words, x in (
        (nn.Embedding(8, 4, sparse=True), "sparse=False", torch.tensor([1, 2])),
        (inner, "one after the other", ones),
        (kernel, r"Triton kernel.*custom_op", ones),
        # no line of the user: the module is named
        (fake, r"a tensor \(in \w+\.\w+\); use", ones),
    ):
        with pytest.raises(UnsupportedError, match=words):
            step_of(model, torch.sum)(x)


def test_errors_of_the_users_own_come_through():
    with pytest.raises(RuntimeError, match=r"reduction dim|shape"):
        step_of(nn.Linear(4, 1), lambda out: out.sum())(torch.randn(2, 5))
    with pytest.raises(ValueError, match="pair"):
        step_of(nn.Linear(4, 1), lambda out: {"loss": out.sum()})(torch.randn(2, 4))


def test_one_argument_that_is_a_whole_batch_is_explained():
    step = step_of(nn.Linear(4, 2), nn.functional.mse_loss)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    for batch in ((x, y), [x, y], {"x": x, "y": y}):
        with pytest.raises(TypeError, match=r"forward\(\)") as refused:
            step(batch)
        assert "step(x, y)" in refused.value.__notes__[0]


def test_an_operation_that_fails_when_it_is_measured_is_named():
    step = step_of(nn.Linear(4, 2), torch.sum)
    with pytest.raises(UnsupportedError, match=r"aten.addmm.*: .*Double and Float"):
        step(torch.randn(3, 4, dtype=torch.float64))


def test_words_for_a_budget_are_listed():
    for face in (lambda b: step_of(nn.Linear(4, 2), torch.sum, budget=b), mt.backend):
        with pytest.raises(ValueError, match=r"train_step also takes '50%'"):
            face(budget="half") if face is mt.backend else face("half")
