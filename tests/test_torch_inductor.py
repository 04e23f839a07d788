"""Steps with kernels of Inductor's: what eager PyTorch computes, in the bytes promised.

Inductor sums in another order than PyTorch's own kernels: beside eager the results are
judged by a tolerance, beside each other bit for bit.
"""

import logging
import warnings

import pytest

from mucudnn.errors import PlanningError

torch = pytest.importorskip("torch")
with warnings.catch_warnings():  # PyTorch's own, as its modules are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._inductor.compile_fx

from torch import nn  # noqa: E402  (where there is PyTorch)

import mucudnn.torch as mt  # noqa: E402
from mucudnn.torch.compile_backend import compile_graph  # noqa: E402
from tests.torch_steps import build, real_peak  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    # Of PyTorch's own modules, as Dynamo and Inductor import and trace them.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*profiling.*"),
]

STEPS = 3


@pytest.fixture(autouse=True)
def one_thread_and_a_folder_of_its_own(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


class Features(nn.Module):
    """What needs much memory one by one, and little at once; then one layer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        wide = torch.log1p(x.abs()) * torch.tanh(x) + torch.sin(x) * torch.cos(x)
        return self.head(wide.mean(dim=2))


def features():
    torch.manual_seed(0)
    batch = torch.randn(32, 64, 256), torch.randint(0, 4, (32,))
    return Features(), nn.functional.cross_entropy, batch


def gpt():
    model, loss_fn, batch = build("gpt")
    return model.eval(), loss_fn, batch  # without dropout, whose numbers are drawn


def adamw(model):
    """With an epsilon above rounding: keys' biases have gradients of nothing else."""
    return torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-3)


def eager(made):
    model, loss_fn, (x, *rest) = made()
    optimizer = adamw(model)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model(x), *rest)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.parameters())


def trained(made, budget, cache, inductor=True):
    """Losses, parameters, the step, and its really measured peak."""
    model, loss_fn, batch = made()
    step = mt.train_step(
        model, loss_fn, adamw(model), budget=budget, cache=cache, inductor=inductor
    )
    losses = [step(*batch).item() for _ in range(STEPS)]
    values = [p.detach().clone() for p in model.parameters()]
    peak = real_peak(lambda: step(*batch)) + step.plan.resident_bytes
    return losses, values, step, peak


def kernels_in(plan):
    nodes = plan.plan.schedule.graph.nodes
    return [node for node in nodes if node.name.startswith("fused.")]


def least_of(made, cache, inductor):
    model, loss_fn, batch = made()
    step = mt.train_step(
        model, loss_fn, adamw(model), budget=2000, cache=cache, inductor=inductor
    )
    with pytest.raises(PlanningError) as error:
        step.prepare(*batch)
    return error.value.least_bytes


@pytest.mark.parametrize("made", [features, pytest.param(gpt, marks=pytest.mark.slow)])
def test_a_step_of_kernels_keeps_its_budget_and_its_numbers(made, tmp_path):
    losses, values, step, peak = trained(made, None, tmp_path)
    assert step.plan.kernels == len(kernels_in(step.plan)) > 1
    assert f"{step.plan.kernels} kernels stand for" in str(step.plan)
    assert peak <= step.plan.peak_bytes
    expected, parameters = eager(made)
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(values, parameters, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)

    least = least_of(made, tmp_path, inductor=True)
    apart = least_of(made, tmp_path, inductor=False)
    assert least <= apart
    for budget in (least, (least + step.plan.peak_bytes) // 2):
        again, same, tight, peak = trained(made, budget, tmp_path)
        assert peak <= tight.plan.peak_bytes <= budget
        if kernels_in(tight.plan):
            assert again == losses
            assert all(map(torch.equal, same, values))


def test_fused_features_need_less_than_they_do_one_by_one(tmp_path):
    least = least_of(features, tmp_path, inductor=True)
    apart = least_of(features, tmp_path, inductor=False)
    wide = 4 * 32 * 64 * 256
    assert least < apart - wide
    _, _, step, peak = trained(features, least, tmp_path)
    assert peak <= step.plan.peak_bytes <= least
    with pytest.raises(PlanningError):
        trained(features, least, tmp_path, inductor=False)


def test_a_compiled_model_is_fused_too(caplog):
    caplog.set_level(logging.INFO, "mucudnn")
    model, loss_fn, (x, y) = features()
    reference, _, _ = features()
    backend = mt.backend(inductor=True, cache=None)
    compiled = torch.compile(model, backend=backend)

    def step(call):
        loss = loss_fn(call(x), y)
        loss.backward()
        return loss.item()

    found = step(compiled)
    assert kernels_in(backend.plans[0])
    assert found == pytest.approx(step(reference), rel=1e-5)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert not [r for r in caplog.records if "is not fused" in r.message]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"inductor": "on"}, TypeError, "inductor must be True or False"),
        ({"fused": True}, ValueError, "there are 'budget', 'tuner', 'inductor' and "),
    ],
)
def test_options_of_torch_compile_are_checked(options, error, says):
    refuses = compile_graph(
        torch.fx.symbolic_trace(nn.Linear(2, 2)), (), options=options
    )
    with pytest.raises(error, match=says):
        refuses(torch.ones(1, 2))
