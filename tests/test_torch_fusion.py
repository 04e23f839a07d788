"""Fused nodes are the nodes that they are made of, whoever compiles them."""

import warnings
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():  # PyTorch's own, as its modules are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._inductor.compile_fx

from torch import nn  # noqa: E402  (where there is PyTorch)

import mucudnn.torch as mt  # noqa: E402
from mucudnn.errors import UnsupportedError  # noqa: E402
from mucudnn.ir.graph import Phase  # noqa: E402
from mucudnn.ir.traits import Batch  # noqa: E402
from mucudnn.torch.capture.step import capture_step  # noqa: E402
from mucudnn.torch.capture.step_tensors import StepParts  # noqa: E402
from mucudnn.torch.execution.bound_step import StepCommit, bind_step  # noqa: E402
from mucudnn.torch.fusion.costs import costs_of_kernels  # noqa: E402
from mucudnn.torch.fusion.fusing import Fusing  # noqa: E402
from mucudnn.torch.fusion.groups import Grouping  # noqa: E402
from mucudnn.torch.fusion.kernels import Kernels, check_compiler  # noqa: E402
from mucudnn.torch.fusion.members import fusible  # noqa: E402
from mucudnn.torch.fusion.rewriting import fused  # noqa: E402
from mucudnn.torch.fusion.runs import Footprint, groups_of  # noqa: E402
from mucudnn.torch.plan_program import LoweredStep, PlanOptions  # noqa: E402
from mucudnn.torch.plan_store import (  # noqa: E402
    Places,
    PlanStore,
    structure_of,
)
from tests.torch_marks import STEPS_RUN  # noqa: E402
from tests.torch_steps import build, real_peak  # noqa: E402

pytestmark = STEPS_RUN

STEPS = 3


def optimizer_of(name, model):
    if name == "gpt":
        return torch.optim.AdamW(model.parameters(), 1e-3)
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def planner(name):
    """The step of a model, measured; the model, its optimizer and a batch."""
    model, loss_fn, batch = build(name)
    optimizer = optimizer_of(name, model)
    captured = capture_step(model, loss_fn, optimizer, batch)
    parts = StepParts.of(model, optimizer)
    return (
        LoweredStep.of_captured(captured, parts).planner(PlanOptions()),
        model,
        optimizer,
        batch,
    )


def interpreted(recipe):
    """A recipe as it is, compiled by nobody."""
    return recipe.function()


def kernels_of(groups):
    found = Kernels(interpreted)
    kernels = {group.name: found.of(group.recipe, group.taken) for group in groups}
    assert None not in kernels.values()
    return kernels


def eager(name):
    model, loss_fn, (x, *rest) = build(name)
    optimizer = optimizer_of(name, model)
    losses = []
    torch.manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model(x), *rest)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("name", ["mlp", "gpt", "conv"])
@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_graph_with_fused_nodes_computes_the_same_bits(name, share):
    plain, model, optimizer, batch = planner(name)
    groups = groups_of(plain.lowered, plain.profile.workspaces)
    assert groups
    lowered = fused(plain.lowered, groups, kernels_of(groups))
    ours = replace(
        plain, lowered=lowered, profile=costs_of_kernels(plain.profile, lowered)
    )
    least = ours.least_budget()
    budget = least + share * (ours.plan().peak_bytes - least)
    plan = ours.plan(budget)
    bound = bind_step(lowered, plan.plan.schedule)
    step = mt.TrainStep(model, build(name)[1], optimizer, budget)
    parts = StepParts.of(step._model, step._optimizer, step._loss_fn)
    given, commit = [*parts.tensors(), *batch], StepCommit(optimizer)
    torch.manual_seed(1)

    def run():
        with commit.step():
            return bound.run(list(given), commit)

    losses = [run()[0].item() for _ in range(STEPS)]
    expected, values = eager(name)
    assert losses == expected
    for mine, theirs in zip(
        (*model.parameters(), *model.buffers()), values, strict=True
    ):
        assert torch.equal(mine, theirs)
    peak = real_peak(run)
    assert peak + plan.resident_bytes <= plan.peak_bytes <= budget


@pytest.mark.parametrize("name", ["mlp", "gpt", "conv"])
def test_groups_are_neighbours_of_one_phase_that_inductor_may_compute(name):
    plain, *_ = planner(name)
    graph = plain.lowered.graph
    groups = groups_of(plain.lowered, plain.profile.workspaces)
    footprint = Footprint(plain.lowered, plain.profile.workspaces)
    members = [name for group in groups for name in group.members]
    assert len(members) == len(set(members))
    for group in groups:
        nodes = [graph.by_name[n] for n in group.members]
        assert len(nodes) > 1
        assert len({node.phase for node in nodes}) == 1
        assert all(fusible(plain.lowered, node) for node in nodes)
        assert not any(node.traits.random or node.traits.expensive for node in nodes)
        assert footprint.fits(group)
        assert not footprint.fits(group, scratch=1 << 30)
        # convex: what lies between reads nothing of the group that is fed back to it
        begin, end = (graph.positions[n] for n in (group.members[0], group.members[-1]))
        inside = set(group.members)
        tainted = {t for node in nodes for t in node.outputs}
        for node in graph.nodes[begin : end + 1]:
            if node.name not in inside and not tainted.isdisjoint(node.inputs):
                assert node.traits.view
                tainted.update(node.outputs)


def test_updates_are_fused_with_what_they_change():
    plain, *_ = planner("conv")
    groups = groups_of(plain.lowered, plain.profile.workspaces)
    updates = [group for group in groups if group.mutates]
    assert updates
    nodes = plain.lowered.graph.by_name
    for group in updates:
        assert {nodes[name].phase for name in group.members} == {Phase.UPDATE}
        assert not group.traits.overwrites
        node = fused(plain.lowered, [group], kernels_of([group])).graph.by_name[
            group.name
        ]
        assert node.mutates == group.mutates
        assert not node.recomputable


def test_a_value_that_changed_in_between_is_not_fused_over():
    """A node that reads state after its update gets the new value."""
    plain, *_ = planner("conv")
    lowered = plain.lowered
    group = next(g for g in groups_of(lowered, {}) if len(g.mutates) == 2)
    nodes = [lowered.graph.by_name[name] for name in group.members]
    assert Grouping(lowered).group(nodes) is not None
    before, now = nodes[-2].mutates[0], nodes[-2].outputs[0]
    last = nodes[-1]
    assert now in last.inputs
    late = replace(last, inputs=tuple(before if n == now else n for n in last.inputs))
    every = tuple(late if n is last else n for n in lowered.graph.nodes)
    other = replace(lowered, graph=replace(lowered.graph, nodes=every))
    assert Grouping(other).group([*nodes[:-1], late]) is None


def test_what_cannot_be_compiled_stays_as_it_is():
    plain, *_ = planner("mlp")

    def refuses(recipe):
        raise NotImplementedError(recipe)

    fusing = Fusing(PlanStore(), Kernels(refuses))
    assert fusing.planner(plain) is plain


def test_what_takes_no_time_is_not_compiled():
    plain, *_ = planner("mlp")
    groups = groups_of(plain.lowered, plain.profile.workspaces)
    least = groups[0]
    times = dict.fromkeys(plain.profile.node_ms, 1.0)
    for group in groups:
        if group.recipe.digest == least.recipe.digest:
            times.update(dict.fromkeys(group.members, 1e-6))
    compiled = []

    def compiler(recipe):
        compiled.append(recipe.digest)
        raise NotImplementedError

    profile = replace(plain.profile, node_ms=times)
    Fusing(PlanStore(), Kernels(compiler)).planner(replace(plain, profile=profile))
    others = {group.recipe.digest for group in groups} - {least.recipe.digest}
    assert set(compiled) == others != set()


def test_kernels_that_are_not_faster_are_not_taken():
    plain, *_ = planner("mlp")

    def slow(recipe):
        run = recipe.function()

        def late(*given):
            return [run(*given) for _ in range(50)][-1]

        return late

    found = Fusing(PlanStore(), Kernels(slow)).planner(plain)
    assert found.lowered.graph.nodes == plain.lowered.graph.nodes


@pytest.mark.parametrize(
    "wrong",
    [
        lambda out: [t.double() for t in out],
        lambda out: [
            torch.cat((t.reshape(-1), t.reshape(-1)))[: t.numel()].view(t.shape)
            for t in out
        ],
        lambda out: [
            t.expand(2, *t.shape)[0]
            if i
            else t.t().contiguous().t()
            if t.dim() == 2
            else t.double()
            for i, t in enumerate(out)
        ],
        lambda out: [out[0], *out] if len(out) > 1 else [out[0].view(-1)],
    ],
)
def test_results_that_lie_otherwise_are_no_kernel(wrong):
    plain, *_ = planner("gpt")
    group = next(g for g in groups_of(plain.lowered, {}) if len(g.outputs) == 4)

    def compiler(recipe):
        run = recipe.function()
        return lambda *given: tuple(wrong(run(*given))[: len(recipe.outputs)])

    assert Kernels(interpreted).of(group.recipe, group.taken) is not None
    assert Kernels(compiler).of(group.recipe, group.taken) is None


def test_every_recipe_is_compiled_once():
    plain, *_ = planner("gpt")
    groups = groups_of(plain.lowered, plain.profile.workspaces)
    compiled = []

    def compiler(recipe):
        compiled.append(recipe.digest)
        return interpreted(recipe)

    kernels = Kernels(compiler)
    for group in (*groups, *groups):
        kernels.of(group.recipe, None)
    assert sorted(compiled) == sorted({group.recipe.digest for group in groups})
    assert len(compiled) < len(groups)


def test_plans_with_fused_nodes_can_be_remembered():
    found = []
    for _ in range(2):
        plain, *_ = planner("gpt")
        groups = groups_of(plain.lowered, {})
        lowered = fused(plain.lowered, groups, kernels_of(groups))
        found.append(structure_of(lowered, Places(lowered)))
        fewer = fused(plain.lowered, groups[1:], kernels_of(groups))
        assert structure_of(fewer, Places(fewer)) != found[-1]
    assert found[0] == found[1]


def test_a_batch_axis_is_that_of_all_members():
    plain, *_ = planner("gpt")
    lowered = plain.lowered
    group = next(g for g in groups_of(lowered, {}) if len(g.members) == 2)
    nodes = [lowered.graph.by_name[name] for name in group.members]
    assert group.traits.batch is None

    def axis(node, which=0):
        rows = Batch(
            tuple(
                which if lowered.layouts[t].shape[:1] == (4,) else None
                for t in node.inputs
            ),
            tuple(which for _ in node.outputs),
        )
        return replace(node, traits=replace(node.traits, batch=rows))

    agreed = Grouping(lowered).group([axis(node) for node in nodes])
    assert agreed.traits.batch.outputs == (0,) * len(agreed.outputs)
    assert 0 in agreed.traits.batch.inputs
    assert (
        Grouping(lowered).group([axis(nodes[0]), axis(nodes[1], 1)]).traits.batch
        is None
    )
    assert Grouping(lowered).group([axis(nodes[0]), nodes[1]]).traits.batch is None


def test_without_a_compiler_one_sentence_says_so():
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(UnsupportedError, match="no-such-compiler"):
            check_compiler(torch.device("cpu"))
        model, loss_fn, batch = build("mlp")
        optimizer = optimizer_of("mlp", model)
        step = mt.train_step(model, loss_fn, optimizer, cache=None, inductor=True)
        with pytest.raises(UnsupportedError, match="compiles kernels"):
            step(*batch)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_option_is_true_or_false(value):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="inductor must be True or False"):
        mt.train_step(
            model, torch.sum, torch.optim.SGD(model.parameters(), 0.1), inductor=value
        )
    with pytest.raises(TypeError, match="inductor must be True or False"):
        mt.backend(inductor=value)
