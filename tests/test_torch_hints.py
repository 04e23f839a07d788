"""Plans as hints for PyTorch's partitioner and checkpoints: what they say is done."""

import functools
import inspect
import math

import pytest

from mucudnn.errors import (
    BackendUnavailableError,
    PlanningError,
    UnsupportedError,
)

torch = pytest.importorskip("torch")

from functorch.compile import nop  # noqa: E402  (where there is PyTorch)
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
)

import mucudnn.torch as mt  # noqa: E402
from mucudnn.torch.costs import measure  # noqa: E402
from mucudnn.torch.hints import selective  # noqa: E402
from tests.torch_steps import build  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*profiling.*"),
]

SMALL = 64
"""Bytes of results that a kernel keeps beside its output: they are not compared."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(before)


def gradients(call, model, loss_fn, x, *targets):
    """Loss and gradients, and the bytes that were kept for the backward pass."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call(x)
    loss = loss_fn(out, *targets)
    loss.backward()
    own = (*model.parameters(), *model.buffers(), x, *targets)
    for tensor in own:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    kept.pop(out.untyped_storage().data_ptr(), None)
    found = [p.grad.clone() for p in model.parameters()]
    return loss.item(), found, [b.clone() for b in model.buffers()], kept


def eager(name):
    model, loss_fn, batch = build(name)
    return gradients(model, model, loss_fn, *batch)


def hinted(name, hint):
    model, loss_fn, batch = build(name)
    compiler = aot_autograd(fw_compiler=nop, partition_fn=hint)
    call = torch.compile(model, backend=compiler, dynamic=False)
    return gradients(call, model, loss_fn, *batch)


def least_budget(name):
    with pytest.raises(Exception, match="the least budget that works") as caught:
        hinted(name, mt.partitioner(budget=0))
    return caught.value.inner_exception.least_bytes


def same(found, wanted):
    assert found[0] == wanted[0]
    for mine, theirs in zip(found[1] + found[2], wanted[1] + wanted[2], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_the_partitioner_saves_what_the_plan_saves(name):
    wanted = eager(name)
    before = math.inf
    for budget in (None, least_budget(name)):
        hint = mt.partitioner(budget=budget)
        found = hinted(name, hint)
        same(found, wanted)
        [policies], [plan] = hint.policies, hint.plans
        tensors = plan.plan.schedule.graph.tensors
        planned = sorted(
            tensors[t].nbytes for t in policies.saved if tensors[t].nbytes > SMALL
        )
        kept = sorted(n for n in found[3].values() if n > SMALL)
        outputs = set(plan.plan.schedule.graph.outputs)
        spared = policies.saved & (outputs | policies.random)
        spare = [tensors[t].nbytes for t in spared]
        for nbytes in kept:
            planned.remove(nbytes)  # each is the plan's
        assert set(planned) <= {*spare}  # results; and what only masks follow from
        assert sum(kept) < before
        before = sum(kept)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_inductor_takes_it(name):
    """Compiled for real; what is computed again is what was computed."""
    _, wanted, buffers, _ = eager(name)
    kept = []
    for budget in (None, least_budget(name)):
        model, loss_fn, batch = build(name)
        hint = mt.partitioner(budget=budget)
        options = {"custom_partitioner_fn": hint}
        call = torch.compile(model, options=options, dynamic=False)
        _, found, after, saved = gradients(call, model, loss_fn, *batch)
        assert len(hint.plans) == 1
        for mine, theirs in zip(found + after, wanted + buffers, strict=True):
            torch.testing.assert_close(mine, theirs)
        kept.append(sum(saved.values()))
    assert kept[1] < kept[0]


def test_offloading_is_marked_for_pytorchs_own_pass():
    hint = mt.partitioner(budget=least_budget("mlp"), offload=True)
    wanted = eager("mlp")
    graphs = []

    def seen(module, example):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return nop(module, example)

    model, loss_fn, batch = build("mlp")
    compiler = aot_autograd(fw_compiler=seen, partition_fn=hint)
    call = torch.compile(model, backend=compiler, dynamic=False)
    same(gradients(call, model, loss_fn, *batch), wanted)
    away = [
        policy
        for policy in hint.policies[0].of.values()
        if policy is CheckpointPolicy.MUST_CPU_OFFLOAD
    ]
    copies = [sum("device_put" in target for target in graph) for graph in graphs]
    assert copies == [len(away), len(away)]
    assert away


needs_results = pytest.mark.skipif(
    "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters,
    reason="needs PyTorch 2.12, whose selective checkpoints show results",
)


def test_selective_checkpoints_that_show_no_results(monkeypatch):
    monkeypatch.setattr(selective, "SelectiveCheckpointContext", lambda is_recompute: 0)
    with pytest.raises(BackendUnavailableError, match=r"2\.12 or newer and found"):
        mt.checkpoint_contexts(None)


@needs_results
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_selective_checkpoints_save_what_the_plan_saves(name, monkeypatch):
    model, loss_fn, batch = build(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    study = mt.memory(model, loss_fn, batch, optimizer)
    wanted = eager(name)
    decided = []
    decide = selective._Policy.__call__

    def recorded(self, context, function, *args, **kwargs):
        policy = decide(self, context, function, *args, **kwargs)
        decided.append(policy)
        return policy

    monkeypatch.setattr(selective._Policy, "__call__", recorded)
    again = []
    for budget in (None, study.least_budget):
        contexts = mt.checkpoint_contexts(study, budget=budget)
        for _ in range(2):  # a forward pass begins anew
            model, loss_fn, batch = build(name)
            decided.clear()
            call = functools.partial(
                checkpoint, model, use_reentrant=False, context_fn=contexts
            )
            same(gradients(call, model, loss_fn, *batch), wanted)
        again.append(decided.count(CheckpointPolicy.MUST_RECOMPUTE))
    assert again[1] > again[0]
    assert CheckpointPolicy.MUST_SAVE in decided


@needs_results
def test_who_asks_again_while_computing_again_is_told_the_same():
    """As PyTorch 2.12.0 does, without results."""
    relu, x = torch.ops.aten.relu.default, torch.ones(2)
    policy = selective._Policy({(str(relu), 1): CheckpointPolicy.MUST_RECOMPUTE})
    first = SelectiveCheckpointContext(is_recompute=False, op_output=x.relu())
    second = SelectiveCheckpointContext(is_recompute=True)
    told = [policy(first, relu, x) for _ in range(3)]
    assert told.count(CheckpointPolicy.MUST_RECOMPUTE) == 1
    assert [policy(second, relu, x) for _ in range(3)] == told


@needs_results
def test_what_cannot_be_checkpointed_is_refused():
    """What is read before it is changed, and computed again after."""

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, x):
            y = torch.bernoulli(x)
            z = x.mm(self.weight) + y * 2
            y.add_(1)
            return z.relu() + y

    model, x = Changing(), torch.rand(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    study = mt.memory(model, lambda y: y.mean(), (x,), optimizer)
    contexts = mt.checkpoint_contexts(study)
    with pytest.raises(UnsupportedError, match=r"aten.add_.*in place"):
        checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    with pytest.raises(PlanningError, match="the least budget that works"):
        mt.checkpoint_contexts(study, budget=2000)


def test_bad_input():
    with pytest.raises(ValueError, match="unknown device 'abacus'"):
        mt.partitioner(device="abacus")
    model = nn.Linear(4, 4)
    compiler = aot_autograd(fw_compiler=nop, partition_fn=mt.partitioner())
    with pytest.raises(Exception, match="dynamic=False"):
        torch.compile(model, backend=compiler, dynamic=True)(torch.ones(7, 4))


class Masked(nn.Module):
    """A layer of a language model whose attention is given a mask."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(found.transpose(1, 2).reshape(x.shape))


def attention_flops(q, k, v, *_, out_val=None, **__):
    return 4 * q.numel() * k.shape[2]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_attention_with_a_mask_is_estimated_planned_and_trained(monkeypatch):
    # Some builds count what attention on the CPU computes; its mask comes by name.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    monkeypatch.setitem(measure.flop_registry, kernel, attention_flops)
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(2, 8, 32)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_fn = nn.functional.mse_loss
    study = mt.memory(model, loss_fn, ((x, mask), x), optimizer, device="h200")
    assert 0 < study.least_budget <= study.unlimited_bytes
    hinted = mt.partitioner(device="h200")
    with_hints = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=hinted)
    wanted = loss_fn(model(x, mask), x)
    gradients = torch.autograd.grad(wanted, [*model.parameters()])
    for way in (with_hints, mt.backend(cache=None)):
        torch._dynamo.reset()
        found = loss_fn(torch.compile(model, backend=way)(x, mask), x)
        assert torch.equal(found, wanted)
        mine = torch.autograd.grad(found, [*model.parameters()])
        assert all(map(torch.equal, mine, gradients))
    assert len(hinted.plans) == 1
    step = mt.train_step(model, loss_fn, optimizer, cache=None)
    assert torch.equal(step((x, mask), x), wanted)
