"""Trainers and studies whose images have channels last."""

import numpy as np
import pytest

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import AlgoPerf, ConvPlan
from mucudnn.ir.optimizers import Momentum
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.layouts import (
    channels_last_nodes,
    cheapest_layouts,
    layout_trials,
    with_channels_last,
)
from mucudnn.passes.graph.training_step import StepChoices, StepRecipe, build_step
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.measured_choices import Layouts
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import StepSpec
from tests.doubles import QUICK
from tests.kernel_cases import close
from tests.training_cases import examples, network, trainer

# Trainers.


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"fuse": False},
        {"split": 2},
        {"parts": 2},
        {"budget": 0.7},
        {"budget": 0.7, "split": "auto"},
        {"options": {"dropout": 0.3}},
    ],
)
def test_a_trainer_finds_the_same_losses(more):
    images, labels = examples(24)

    def losses(layout):
        settings = dict(more)
        if "budget" in more:
            settings["budget"] = int(trainer(layout=layout).peak_bytes * more["budget"])
        made = trainer(layout=layout, **settings)
        rows = [slice(8 * i, 8 * i + 8) for i in range(3)]
        found = [float(made.step(images[r], labels[r]).loss) for r in rows]
        return np.array(found), made.predict(images[:5]), made

    expected, answers, one = losses("NCHW")
    found, same, other = losses("NHWC")
    close(found, expected, 1e-6)
    close(same, answers, 1e-5)
    kinds = {n.attrs["problem"].layout for n in other.graph.nodes if n.op == "conv"}
    assert kinds == {"NHWC"}
    for name, value in one.state.save().items():
        assert other.state.save()[name].shape == value.shape


def test_a_trainer_measures_layouts():
    told = []
    made = trainer(layout="auto", progress=lambda name, *_: told.append(name))
    assert any("to_channels" not in name and ":" in name for name in told)
    layouts = {n.attrs["problem"].layout for n in made.graph.nodes if n.op == "conv"}
    assert layouts <= {"NCHW", "NHWC"}


def test_what_cannot_be_measured_keeps_its_channels_first(caplog):
    graph = network(8)
    tuner = Tuner(rule=QUICK, batch_policy="undivided")
    small = MemoryBudget(nbytes=2000)
    assert Layouts("auto", tuner, small, None)(graph, True) is graph
    assert "layouts are not compared" in caplog.text
    turned = Layouts("NHWC", tuner, small, None)(graph, True)
    assert {s.layout for s in turned.tensors.values()} == {"NCHW", "NHWC"}


@pytest.mark.parametrize("layout", ["NHWC", "auto"])
def test_virtual_devices_have_layouts(layout):
    made = trainer(backend="null", layout=layout)
    kinds = {n.attrs["problem"].layout for n in made.graph.nodes if n.op == "conv"}
    assert kinds == {"NHWC" if layout == "NHWC" else "NCHW"}


def test_weights_go_from_one_layout_to_another(tmp_path):
    images, labels = examples(8)
    one, other = trainer(), trainer(layout="NHWC", seed=7)
    one.step(images, labels)
    one.save_weights(tmp_path / "weights.safetensors")
    other.load_weights(tmp_path / "weights.safetensors")
    close(other.predict(images), one.predict(images), 1e-5)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="unknown layout 'CHWN'; choose one of: NCHW"):
        trainer(layout="CHWN")


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_gradient_that_is_a_view_is_there_before_it_is_used(when, parts):
    """Of a filter with one tap, which is turned for nothing."""
    g = GraphBuilder()
    x = g.conv(g.input("image", (2, 3, 4, 4)), 3, 1, bias=False)
    label = g.input("label", (2,), "int64")
    graph = g.build(g.softmax_cross_entropy(g.linear(g.flatten(x), 3), label))
    turned = with_channels_last(graph, channels_last_nodes(graph))
    recipe = StepRecipe(
        optimizer=Momentum(), update_when=when, micro_batches=parts, fuse=False
    )
    choices = StepChoices(keep_copies=lambda step: False)
    for step in build_step(turned, recipe, choices).steps:
        assert any(node.op == "reshape" for node in step.nodes)


def test_strips_of_a_trainer_need_channels_first():
    with pytest.raises(ValueError, match="use the layout NCHW"):
        trainer(layout="NHWC", split="height:2")


# Studies.


def studied(layout, **more):
    spec = StepSpec(model="lenet", batch=4, device="null", layout=layout)
    return study_memory(spec, policies=["keep_all"], budget="1GiB", **more)


def test_a_study_says_what_is_turned():
    first, found = studied("NCHW"), studied("NHWC")
    assert "layout" not in first.figures
    words = found.figures["layout"]
    assert words.startswith("channels last in 5 of 5 convolutions; ")
    assert found.to_json()["figures"]["layout"] == words
    assert found.parameters == first.parameters
    assert found.unbounded_ms > first.unbounded_ms  # estimates do not prefer a layout


def test_a_study_chooses_layouts_by_estimates():
    found = studied("auto")
    assert found.figures["layout"].startswith("channels last in 0 of 5 convolutions")
    assert found.unbounded_ms == studied("NCHW").unbounded_ms


def on_tensor_cores(layout, precision=None, model="resnet18", **more):
    more = {"batch": 32, "device": "h200"} | more
    return StepSpec(model=model, layout=layout, precision=precision, **more)


def kept(spec):
    return study_memory(spec, policies=["keep_all"], budget="64GiB")


@pytest.mark.parametrize("precision", [None, "float16"])
def test_channels_last_pay_on_tensor_cores(precision):
    first, last, auto = (
        kept(on_tensor_cores(layout, precision)) for layout in ("NCHW", "NHWC", "auto")
    )
    assert auto.unbounded_ms <= last.unbounded_ms < first.unbounded_ms
    assert auto.unbounded_ms < 0.95 * first.unbounded_ms
    assert "channels last in 0 of" not in auto.figures["layout"]


def test_half_precision_takes_less_memory_and_time():
    wide, half = (
        kept(on_tensor_cores("NHWC", kind, batch=512)) for kind in (None, "float16")
    )
    assert half.parameters == wide.parameters
    assert 0.4 < half.unbounded_ms / wide.unbounded_ms < 0.6
    assert 0.5 < half.unbounded.peak_bytes / wide.unbounded.peak_bytes < 0.55
    assert half.figures["precision"].startswith("float16 ")
    assert "precision" not in wide.figures
    answering = on_tensor_cores("NCHW", "float16", inference=True).graph()
    kinds = {n.attrs["problem"].dtype for n in answering.nodes if n.op == "conv"}
    assert kinds == {"float16"}


def test_a_study_in_half_precision_needs_figures_of_it():
    spec = on_tensor_cores("NCHW", "float16", "lenet", device="p100")
    with pytest.raises(
        ValueError, match=r"float16, for .* devices that have them: h200, a100, h100"
    ):
        study_memory(spec)
    with pytest.raises(ValueError, match="unknown narrow type 'int8'"):
        on_tensor_cores("NCHW", "int8", "lenet").graph()


def test_a_study_in_strips_needs_channels_first():
    with pytest.raises(ValueError, match="use the layout NCHW"):
        studied("NHWC", split="height:2")


def test_a_study_of_the_cpu_cannot_choose_layouts():
    spec = StepSpec(model="lenet", batch=4, device="cpu", layout="auto")
    with pytest.raises(ValueError, match="Trainer"):
        study_memory(spec)
    with pytest.raises(ValueError, match="choose NCHW or NHWC"):
        spec.graph()


def test_times_of_both_layouts_decide():
    """Convolutions that are faster with channels last have them so."""
    spec = StepSpec(model="lenet", batch=4, device="h200")
    forward = spec.network()
    graphs = (
        training_graph(forward),
        training_graph(with_channels_last(forward, channels_last_nodes(forward))),
    )
    rows = {
        problem: 0.5 if problem.layout == "NHWC" else 50.0
        for graph in graphs
        for problem in (n.attrs["problem"] for n in graph.nodes if n.op == "conv")
    }
    perfs = {
        problem: AlgoPerf(algo="A", batch=4, time_ms=ms, workspace=0)
        for problem, ms in rows.items()
    }
    fronts = {problem: (ConvPlan(problem, (p,)),) for problem, p in perfs.items()}
    trials = layout_trials(forward, channels_last_nodes(forward), trains=True)
    times = estimate(trials.graph, "h200", fronts=fronts).node_ms
    chosen = cheapest_layouts(forward, trials.costs(times))
    turned = with_channels_last(forward, chosen)
    kinds = {n.attrs["problem"].layout for n in turned.nodes if n.op == "conv"}
    assert kinds == {"NHWC"}


def test_only_images_that_several_touch_are_timed_in_both_layouts():
    """Places of a pool's largest are bytes, which no GPU's kernel turns."""
    g = GraphBuilder()
    x = g.max_pool(g.conv(g.input("image", (2, 3, 8, 8)), 4, 3), 2)
    x = g.conv(x, 3, 1)
    labels = g.input("label", (2, *g.shape(x)[2:]), "int64")
    graph = g.build(g.softmax_cross_entropy(x, labels))
    trials = layout_trials(graph, channels_last_nodes(graph), trains=True)
    turned = {
        trials.graph.tensors[n].dtype
        for t in trials.graph.nodes
        if t.op.startswith("to_channels")
        for n in t.tensors
    }
    assert turned == {"float32"}
    assert "image" in trials.transposed
    assert "label" not in trials.transposed
