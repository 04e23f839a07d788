"""What a step moves, as `python -m bench traffic` counts it."""

from dataclasses import replace

import pytest

from bench.traffic import BATCHES, _step, traffic_of
from tests.cupy_fake import StrictArray, StrictCupy
from tests.test_cuda_training import stand_in
from tests.training_cases import examples, trainer


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("model", ["vgg16", "unet2d"])
def test_half_precision_moves_half_the_bytes_but_of_updates(model, layout):
    """Those of many parameters move most of what is left: masters stay wide."""
    wide, half = (
        _step(model, BATCHES[model], p, True, layout) for p in (None, "float16")
    )
    assert (
        half["update_bytes"] <= wide["update_bytes"]
    )  # which may write filters turned
    assert half["update_bytes"] > wide["bytes"] / 250
    wide_rest, half_rest = (s["bytes"] - s["update_bytes"] for s in (wide, half))
    assert half_rest <= 0.506 * wide_rest  # an index of a maximum has a byte in both
    assert half["bytes"] <= 0.53 * wide["bytes"]


def test_channels_last_turns_little_and_saves_what_is_turned_inside():
    first, last = (
        _step("resnet50", 256, "float16", True, layout) for layout in ("NCHW", "NHWC")
    )
    turned = sum(
        found["bytes"] for op, found in last["operations"].items() if "channels" in op
    )
    assert last["turned_inside_bytes"] == 0
    assert 0 < turned < first["turned_inside_bytes"] / 20
    assert last["bytes"] < 1.05 * first["bytes"]


def test_a_bias_and_a_relu_within_convolutions_are_not_moved():
    first, last = (
        _step("vgg16", 128, "float16", True, layout) for layout in ("NCHW", "NHWC")
    )
    for step in (first, last):
        assert step["operations"]["bias_relu"]["launches"] == 2  # of the linear layers
        apart = _step("vgg16", 128, "float16", False)
        assert step["bytes"] < 0.7 * apart["bytes"]


@pytest.mark.parametrize("model", BATCHES)
def test_channels_last_take_hardly_more_launches(model):
    """Filters are kept as convolutions read them, and sums need no launch to merge."""
    first, last = (
        _step(model, BATCHES[model], "float16", True, layout)
        for layout in ("NCHW", "NHWC")
    )
    assert last["launches"] <= 1.1 * first["launches"]
    turned = [op for op in last["operations"] if "channels" in op]
    images = 4  # the input, the answers of a network without a linear layer, gradients
    assert sum(last["operations"][op]["launches"] for op in turned) <= images


class Named(StrictCupy):
    """CuPy's stand-in, whose kernels are named and do nothing."""

    def _launch(self, source, name, options, grid, block, arguments):
        if name != "spin":
            self.launched.append(name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # nothing is computed
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("precision", [None, "float16"])
def test_launches_are_those_of_a_trainer(precision, layout, monkeypatch):
    cupy, gpu = stand_in(monkeypatch, kind=Named)
    gpu = replace(gpu, library_kernels=None)
    made = trainer(backend=gpu, precision=precision, layout=layout, update_when="late")
    copies = []
    monkeypatch.setattr(StrictArray, "__setitem__", lambda *a: copies.append(a))
    made.step(*examples(8))
    counted = traffic_of(made.graph)
    apart = sum(counted[op].launches for op in ("conv", "matmul"))
    launched = len(cupy.launched) + len(copies)
    assert launched == sum(t.launches for t in counted.values()) - apart


@pytest.mark.torch
@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_an_eager_step_is_counted_as_by_hand(precision, monkeypatch):
    pytest.importorskip("torch")
    from torch import nn

    import bench.traffic_eager as eager

    def network():
        body = (
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
        )
        return nn.Sequential(
            *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )

    monkeypatch.setitem(eager.NETWORKS, "one", network)
    counted = eager.eager_traffic("one", (2, 3, 64, 64), (2,), precision, "NHWC")
    size = 2 if precision else 4
    x, y = 2 * 3 * 64 * 64 * size, 2 * 8 * 64 * 64 * size
    # Convolution, norm, ReLU, mean; those of the last three, and of the filter.
    images = (x + y) + 3 * y + 2 * y + y + y + 3 * y + 5 * y + (y + x)
    images += x // size * (4 + 2) if precision else 0  # narrowed
    assert images < counted.nbytes < 1.02 * images
    conv, linear = 2 * 2 * 64 * 64 * 3 * 8 * 9, 2 * 2 * 8 * 4
    assert counted.flops == 2 * conv + 3 * linear
    assert counted.ms > 0


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model", "batch", "layout"), [("resnet50", 32, "NHWC"), ("unet2d", 2, "NCHW")]
)
def test_our_step_moves_less_than_an_eager_one_and_computes_as_much(
    model, batch, layout
):
    pytest.importorskip("torch")
    from bench.traffic_beside import beside_eager

    (row,) = beside_eager([_step(model, batch, "float16", True, layout)])
    ours, theirs = row["ours"], row["torch"]
    assert row["flops"] == _step(model, batch, "float16", True, layout)["flops"]
    assert ours["launches"] < theirs["launches"]
    assert ours["bytes"] < 0.9 * theirs["bytes"]
    assert ours["ms"] < 0.9 * theirs["ms"]
