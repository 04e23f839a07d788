"""What a PyTorch step needs on a device, without running it."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.devices import get_device
from mucudnn.passes.residency import decide
from mucudnn.studies.memory import study_memory
from mucudnn.torch import TrainStep
from mucudnn.torch.costs.measure import estimated
from mucudnn.torch.plan_program import PlanOptions
from tests.torch_own_updates import OPTIMIZERS, built
from tests.torch_steps import build, least_bytes

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*profiling.*")]

H200 = "h200"


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-3)


def study_of(name, **options):
    """A study of a model, or of an optimizer that updates eagerly."""
    if name in OPTIMIZERS:
        model, optimizer, batch = built(OPTIMIZERS[name], 2048)
        return mt.memory(model, functional.mse_loss, batch, optimizer, **options)
    model, loss_fn, batch = build(name)
    return mt.memory(model, loss_fn, batch, adamw(model), **options)


def least_of(model, loss_fn, batch, optimizer):
    """What `train_step` says it needs, with the same figures."""

    def costs(lowered):
        return estimated(lowered, get_device(H200))

    step = TrainStep(model, loss_fn, optimizer, 0, PlanOptions(costs))
    return least_bytes(step.prepare, *batch)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_it_is_what_train_step_plans_for(name):
    model, loss_fn, batch = build(name)
    optimizer = adamw(model)
    study = mt.memory(model, loss_fn, batch, optimizer, device=H200)
    assert study.least_budget < study.unlimited_bytes
    assert not optimizer.state  # and nothing was made for it
    assert study.least_budget == least_of(model, loss_fn, batch, optimizer)
    assert study.plan(study.least_budget).peak_bytes <= study.least_budget
    # An optimizer that has its state needs the same.
    again = mt.memory(model, loss_fn, batch, optimizer, device=H200)
    assert again.least_budget == study.least_budget


def test_measured_here_it_is_train_steps_budget():
    model, loss_fn, batch = build("mlp")
    study = mt.memory(model, loss_fn, batch, adamw(model), device="cpu")
    step = mt.train_step(model, loss_fn, adamw(model), budget=study.least_budget)
    step(*batch)
    assert step.plan.peak_bytes <= study.least_budget
    step = mt.train_step(model, loss_fn, adamw(model), budget=study.least_budget - 64)
    with pytest.raises(PlanningError):
        step(*batch)


@pytest.mark.parametrize(
    "name", ["mlp", "gpt", "adafactor", "counting_in_state", "lbfgs"]
)
def test_models_without_data_need_as_much_and_may_exceed_any_memory(name):
    wanted = study_of(name)
    with torch.device("meta"):
        found = study_of(name)
        model = nn.Sequential(*(nn.Linear(1 << 18, 1 << 18) for _ in range(4)))
        x = torch.empty(16, 1 << 18)
    assert found.least_budget == wanted.least_budget
    assert found.unlimited_bytes == wanted.unlimited_bytes
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    study = mt.memory(model, lambda y: y.square().mean(), (x,), optimizer)
    weights = 4 * 4 * (1 << 36)
    assert weights < study.least_budget < 2 * weights


def test_the_largest_batch_fits_and_the_next_does_not():
    model, loss_fn, batch = build("mlp")
    study = mt.memory(model, loss_fn, batch, adamw(model), device=H200)
    budget = 3 * study.least_budget
    most = study.max_batch(budget)
    assert most > len(batch[0])

    def needs(size):
        other = [t.new_zeros((size, *t.shape[1:])) for t in batch]
        return least_of(model, loss_fn, other, adamw(model))

    assert needs(most) <= budget < needs(most + 1)
    with pytest.raises(PlanningError, match="a batch of one needs") as caught:
        study.max_batch(1024)
    assert study.max_batch(caught.value.least_bytes) >= 1


def test_a_budget_for_a_slowdown_is_fast_enough_and_throughput_is_predicted():
    study = study_of("mlp", device=H200)
    found = study.budget_for(slowdown=1.05)
    assert study.least_budget <= found <= study.unlimited_bytes
    assert study.plan(found).slowdown <= 1.05
    with pytest.raises(ValueError, match="slowdown"):
        study.budget_for(0.9)
    rates = study.throughput(study.unlimited_bytes)
    assert max(rates) == study.max_batch(study.unlimited_bytes)
    assert all(rate > 0 for rate in rates.values())
    assert study_of("mlp", accumulate=4).unlimited_bytes < study.unlimited_bytes


def test_less_memory_costs_no_less_time():
    study = study_of("mlp")
    budgets = list(study.curve)
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == study.unlimited_bytes
    assert budgets[-1] == study.least_budget
    times = list(study.curve.values())
    assert times[0] == pytest.approx(1)
    assert times == sorted(times)
    text = str(study)
    assert "NVIDIA H200" in text
    assert len(text.splitlines()) == 1 + len(budgets)


@pytest.mark.parametrize("name", ["mlp", "adafactor", "lbfgs"])
def test_techniques_are_compared_on_it(name):
    study = study_of(name)
    found = study_memory(
        study.described(),
        policies=("keep_all", "planned"),
        budget=study.least_budget,
        min_budget=True,
    )
    assert found.minimum == study.least_budget
    assert found.min_budget["keep_all"] == study.unlimited_bytes
    kept, ours = found.techniques
    assert not kept.fits
    assert ours.peak_bytes <= study.least_budget
    if name == "mlp":
        assert found.parameters == 64 * 256 + 256 * 256 + 256 * 10 + 522
    with pytest.raises(ValueError, match="has its own costs"):
        study_memory(study.described(), device="cpu")


@pytest.mark.parametrize(("name", "word"), [("mlp", "AdamW"), ("lbfgs", "LBFGS")])
def test_a_report_and_a_notebooks_cell(name, word):
    study = study_of(name)
    page = study.report("1.6MiB")
    assert page.startswith("<!DOCTYPE html>")
    assert "1.6 MiB" in page
    assert word in page
    assert len(re.findall("<svg", page)) >= 3
    cell = study._repr_html_()
    assert cell.startswith("<div")
    assert "<svg" in cell


def test_its_summary_needs_no_plan():
    expected = "<MemoryStudy of Sequential, AdamW, batch 128, on h200>"
    assert repr(study_of("mlp")) == expected


def test_the_optimizers_hooks_are_counted():
    """What clips gradients needs all of them at once, unless they leave."""

    def clip(optimizer, args, kwargs):
        del args, kwargs
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)

    model, loss_fn, batch = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bare = mt.memory(model, loss_fn, batch, optimizer).unlimited_bytes
    optimizer.register_step_pre_hook(clip)
    clipped = mt.memory(model, loss_fn, batch, optimizer)
    assert clipped.unlimited_bytes > bare
    assert clipped.least_budget == least_of(model, loss_fn, batch, optimizer)


class Named(nn.Module):
    """Takes tensors by name, and one of them nested."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x, targets, scales=None, square=False):
        y = self.layer(x) * scales["all"][0]
        y = y.square() if square else y
        return functional.cross_entropy(y, targets)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_batches_are_those_of_train_step(accumulate):
    x, y = torch.randn(128, 64), torch.randint(10, (128,))
    scales = {"all": [torch.rand(128, 1)]}
    model = Named()
    optimizer = adamw(model)
    named = {"x": x, "targets": y, "scales": scales, "square": True}
    inside = (named,)
    found = []
    for example, args, kwargs in ((named, (), named), (inside, inside, {})):
        study = mt.memory(
            model, lambda loss: loss, example, optimizer, accumulate=accumulate
        )
        found += [study.unlimited_bytes]
        study = mt.memory(
            *(model, lambda loss: loss, example, optimizer),
            device="cpu",
            accumulate=accumulate,
        )
        step = mt.train_step(
            model, lambda loss: loss, optimizer, cache=None, accumulate=accumulate
        )
        assert step.prepare(*args, **kwargs).peak_bytes == study.unlimited_bytes
        if accumulate == 1 or kwargs:  # other sizes take long
            assert study.max_batch(2 * study.least_budget) > 128
    assert found[0] == found[1]


@pytest.mark.parametrize("split", ["auto", 2, "height:4"])
def test_what_may_run_in_parts_is_what_train_step_plans(split):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)
    )
    batch = torch.randn(2, 3, 24, 16), torch.randn(2, 3, 24, 16)
    loss_fn = nn.functional.mse_loss
    made = model, loss_fn, batch, torch.optim.SGD(model.parameters(), 0.1)
    whole = mt.memory(*made, device=H200).least_budget
    study = mt.memory(*made, device=H200, split=split)
    least = study.least_budget
    assert least < whole
    compared = study_memory(
        mt.memory(*made, device=H200).described(),
        policies=("planned",),
        budget=least,
        split=split,
    )
    assert compared.best is compared.techniques[-1]  # the whole step does not fit
    assert compared.best.peak_bytes <= compared.minimum == least
    assert study.plan(least).splitting.chosen.parts > 1
    with pytest.raises(PlanningError) as refused:
        study.plan(least - 1)
    assert refused.value.least_bytes == least
    here = mt.memory(*made, device="cpu", split=split).least_budget
    model, loss_fn, batch, optimizer = made
    options = {"split": split, "cache": None}
    step = mt.train_step(model, loss_fn, optimizer, budget=here, **options)
    step(*batch)
    assert step.plan.peak_bytes <= here
    if split == "auto":
        assert study.max_batch(whole) >= 2
        assert "H200" in str(study)
        assert study.report().startswith("<!DOCTYPE html>")


def test_bad_input():
    model, loss_fn, (x, y) = build("mlp")
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=r"unknown device 'abacus'.*h200"):
        mt.memory(model, loss_fn, (x, y), optimizer, device="abacus")
    with pytest.raises(ValueError, match="split must be"):
        mt.memory(model, loss_fn, (x, y), optimizer, split="width")
    with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
        mt.memory(model, loss_fn, (x, y), optimizer, accumulate=0)
    with pytest.raises(TypeError, match=r"must be a batch, such as \(x, y\)"):
        mt.memory(model, loss_fn, x, optimizer)
    with pytest.raises(TypeError, match="the batch has a int"):
        mt.memory(model, loss_fn, (x, 3), optimizer)
    with pytest.raises(TypeError, match="has no tensor"):
        mt.memory(model, loss_fn, (), optimizer)
    with pytest.raises(TypeError, match=r"example must .* got a str"):
        mt.memory(model, loss_fn, "xy", optimizer)
    study = mt.memory(
        model, lambda out, t, w: out.mean() * w, (x, y, x[0, 0]), optimizer
    )
    assert study.least_budget
    with pytest.raises(ValueError, match=r"\(128, 64\), \(128,\), \(\)"):
        study.max_batch("1GiB")

    def deciding(out, target):
        return out.sum() if out.sum().item() > 0 else -out.sum()

    with pytest.raises(UnsupportedError, match="branches on the value"):
        _ = mt.memory(model, deciding, (x, y), optimizer).least_budget


def test_a_study_for_another_device_has_no_kernel_that_only_the_cpu_has():
    model = nn.LSTM(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(7, 4, 8), torch.randn(7, 4, 16)

    def kernels(device):
        study = mt.memory(
            model,
            lambda found, y: (found[0] - y).square().mean(),
            batch,
            optimizer,
            device=device,
        )
        nodes = study.plan().plan.schedule.graph.nodes
        return {n.name.partition(".")[0] for n in nodes if "mkldnn" in n.name}

    enabled = torch._C._get_mkldnn_enabled()
    assert kernels("cpu") == {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
    assert not kernels("h200")
    assert torch._C._get_mkldnn_enabled() == enabled


class Masked(nn.Module):
    """Attention with a mask, of an input that was rounded to eight bits."""

    def __init__(self, mask):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 1)
        self.register_buffer("mask", mask)

    def forward(self, x):
        x = x.to(torch.float8_e4m3fn).to(self.out.weight.dtype)
        q, k, v = self.qkv(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16])
def test_attention_with_a_mask_and_short_types_are_studied(kind):
    whole = torch.float32 if kind is torch.bool else kind
    model = Masked(torch.ones(8, 8).tril().to(kind)).to(whole)
    batch = torch.randn(4, 8, 16), torch.randn(4, 8, 1, dtype=whole)
    study = mt.memory(model, functional.mse_loss, batch, adamw(model), device=H200)
    assert 0 < study.least_budget <= study.unlimited_bytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_a_part_that_is_compiled_in_place_is_captured_as_it_is_written():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    batch = torch.randn(4, 8), torch.randn(4, 1)
    plain = mt.memory(model, functional.mse_loss, batch, adamw(model), device=H200)
    model[0].compile()
    found = mt.memory(model, functional.mse_loss, batch, adamw(model), device=H200)
    assert found.least_budget == plain.least_budget


class NormedResidual(nn.Module):
    """A block whose residual sums in low precision only the forward pass reads."""

    def __init__(self, width):
        super().__init__()
        self.widen, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        hidden = self.widen(normed.to(x.dtype) * self.scale)
        return x + self.out(functional.silu(hidden))


@pytest.mark.parametrize(
    "policy", ["superneurons", "superneurons_speed", "superneurons_memory"]
)
def test_recomputation_does_not_grow_with_the_depth_of_residual_sums(policy):
    def recomputed(blocks):
        layers = (NormedResidual(64) for _ in range(blocks))
        model = nn.Sequential(*layers).to(torch.bfloat16)
        batch = 2 * (torch.randn(256, 64, dtype=torch.bfloat16),)
        study = mt.memory(model, functional.mse_loss, batch, adamw(model), device=H200)
        request = study.described().request(256)
        nodes = request.rewritten(decide(policy, request)).graph.nodes
        return len(nodes) - len(request.graph.nodes)

    assert 0 < recomputed(8) <= 2.5 * recomputed(4)
