import math

import pytest

from mucudnn.ir.graph import Phase
from mucudnn.ir.initializers import Constant
from mucudnn.ir.optimizers import (
    OPTIMIZERS,
    ConstantRate,
    CosineRate,
    Momentum,
    Sgd,
    StepRate,
    parse_learning_rate,
    parse_optimizer,
)
from mucudnn.ir.tensor import Role
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import dependencies
from tests.graphs import NETWORKS, Symbols, chain
from tests.plain_schedule import keep_all, peak_bytes
from tests.schedule_oracle import verify

INPUTS = {
    "sgd": 3,
    "momentum": 4,
    "nesterov": 4,
    "adam": 6,
    "adamw": 6,
    "adagrad": 4,
    "rmsprop": 4,
}


def updates(graph):
    return [node for node in graph.nodes if node.phase is Phase.UPDATE]


@pytest.mark.parametrize("word", OPTIMIZERS)
@pytest.mark.parametrize("when", ["early", "late"])
def test_every_parameter_is_updated_once(word, when):
    plain = NETWORKS["residual"]()
    graph = with_updates(plain, OPTIMIZERS[word], when=when)
    found = updates(graph)
    assert {node.inputs[0]: node.inputs[1] for node in found} == plain.gradients
    assert len(found) == len(plain.gradients)
    for node in found:
        w, _, lr, *rest = node.inputs
        step = [name for name in rest if graph.tensors[name].dtype == "int64"]
        state = rest[len(step) :]
        assert lr == "lr"
        assert step == (["step"] if "adam" in word else [])
        assert len(node.inputs) == INPUTS[word]
        assert node.mutates == (w, *state)
        assert node.outputs == ()
        for name in state:
            assert graph.tensors[name].role is Role.STATE
            assert graph.tensors[name].shape == graph.tensors[w].shape
            assert graph.initializers[name] == Constant(0.0)
    assert [n for n in graph.nodes if n.phase is not Phase.UPDATE] == list(plain.nodes)
    verify(keep_all(in_place(graph)))


@pytest.mark.parametrize("name", NETWORKS)
def test_early_updates_change_nothing_but_the_time(name):
    plain = NETWORKS[name]()
    early = with_updates(plain, Momentum(), when="early")
    late = with_updates(plain, Momentum(), when="late")
    symbols = Symbols()
    assert symbols.meaning(early) == symbols.meaning(late)
    assert peak_bytes(early) <= peak_bytes(late)
    count = len(updates(late))
    assert [node.phase for node in late.nodes[-count:]] == [Phase.UPDATE] * count


@pytest.mark.parametrize("name", NETWORKS)
def test_early_is_as_early_as_can_be(name):
    graph = with_updates(NETWORKS[name](), Sgd())
    before = dependencies(graph)
    made = [i for i, node in enumerate(graph.nodes) if node.phase is Phase.UPDATE]
    assert made
    for position in made:
        between = graph.nodes[max(before[position]) + 1 : position]
        assert all(other.phase is Phase.UPDATE for other in between)


def test_weights_decay_but_biases_do_not():
    graph = with_updates(chain(2), Sgd(weight_decay=0.5), gradient_scale=0.25)
    for node in updates(graph):
        axes = len(graph.tensors[node.inputs[0]].shape)
        assert node.attrs["weight_decay"] == (0.5 if axes > 1 else 0.0)
        assert node.attrs["gradient_scale"] == 0.25


def test_hyperparameters_reach_the_kernels():
    found = {
        word: dict(updates(with_updates(chain(1), OPTIMIZERS[word]))[0].attrs)
        for word in OPTIMIZERS
    }
    assert found["nesterov"]["nesterov"]
    assert not found["momentum"]["nesterov"]
    assert found["momentum"]["momentum"] == 0.9
    assert found["adamw"]["decoupled"]
    assert not found["adam"]["decoupled"]
    assert (found["adam"]["beta1"], found["adam"]["beta2"]) == (0.9, 0.999)
    assert found["rmsprop"]["alpha"] == 0.99
    assert found["adagrad"]["eps"] == 1e-10


def test_what_cannot_be_updated_is_refused():
    training = chain(1)
    updated = with_updates(training, Momentum())
    with pytest.raises(ValueError, match='"early" or "late", not \'now\''):
        with_updates(training, Sgd(), when="now")
    with pytest.raises(ValueError, match="training_graph first"):
        with_updates(in_place(type(training)(training.tensors, (), ())), Sgd())
    with pytest.raises(ValueError, match="are called"):
        with_updates(updated, Momentum())


def test_words():
    assert parse_optimizer("nesterov", learning_rate=0.5) == Momentum(0.5, 0.9, True)
    assert parse_optimizer("sgd", weight_decay=0.1) == Sgd(weight_decay=0.1)
    assert parse_optimizer("adamw").decoupled
    with pytest.raises(ValueError, match="unknown optimizer 'sdg'; choose one of: ada"):
        parse_optimizer("sdg")
    with pytest.raises(ValueError, match="learning_rate must be at least 0"):
        parse_optimizer("sgd", learning_rate=-1.0)
    with pytest.raises(ValueError, match="weight_decay must be at least 0, got nan"):
        parse_optimizer("sgd", weight_decay=math.nan)


def test_rates():
    assert ConstantRate(0.5).at(7, 10) == 0.5
    step = parse_learning_rate("step:2,4", 1.0, milestone_unit=10)
    assert step == StepRate(1.0, (20, 40))
    assert [step.at(s, 50) for s in (19, 20, 40)] == pytest.approx([1, 0.1, 0.01])
    cosine = CosineRate(2.0, final=1.0)
    assert cosine.at(0, 100) == 2.0
    assert cosine.at(50, 100) == pytest.approx(1.5)
    assert cosine.at(100, 100) == cosine.at(200, 100) == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["constant", "cosine", "step:30,60,90"])
def test_warm_up_is_linear_and_then_the_rate_never_rises(text):
    rate = parse_learning_rate(text, 0.4, warmup_steps=5)
    rates = [rate.at(s, 100) for s in range(100)]
    assert rates[:5] == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.4])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert min(rates) > 0


@pytest.mark.parametrize(
    "text", ["", "linear", "step", "step:", "step:a", "step:3,2", "step:-1", "cosine:2"]
)
def test_texts_that_are_no_schedule(text):
    with pytest.raises(ValueError, match="unknown learning-rate schedule"):
        parse_learning_rate(text, 0.1)


def test_rates_out_of_range():
    with pytest.raises(ValueError, match="the learning rate must be at least 0"):
        parse_learning_rate("constant", -0.1)
    with pytest.raises(ValueError, match="warmup_steps must be at least 0"):
        parse_learning_rate("constant", 0.1, warmup_steps=-1)
