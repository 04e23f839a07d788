"""Networks against what the literature says of them: sizes, depths, memory."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.tensor import Role
from mucudnn.models import IMAGE, LABEL, MODELS, get_model, resnet_superneurons
from mucudnn.passes.graph.autodiff import training_graph
from tests.examples import examples
from tests.model_cases import CASES, Case

COUNTS = {
    "alexnet": 62_378_344,
    "alexnet_owt": 61_100_840,
    "cifar_quick": 145_578,
    "densenet40": 1_019_722,
    "densenet121": 7_978_856,
    "digits": 13_706,
    "googlenet": 13_378_280,
    "googlenet_plain": 6_998_552,
    "inception_v4": 42_679_816,
    "lenet": 431_080,
    "overfeat": 145_920_872,
    "resnet18": 11_689_512,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet34": 21_797_672,
    "resnet44": 658_586,
    "resnet50": 25_557_032,
    "resnet56": 853_018,
    "resnet101": 44_549_160,
    "resnet110": 1_727_962,
    "resnet152": 60_192_808,
    "unet2d": 31_030_658,
    "unet2d_bn": 31_030_658 + 2 * 2 * (64 + 128 + 256 + 512) * 2 + 2 * 2 * 1024,
    "unet3d": 19_069_955 + 2 * (1440 + 896),
    "unet3d_plain": 19_069_955,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}
"""Published, or published plus what batch norm adds: two numbers a channel."""

DEPTHS = {
    "alexnet": 8,
    "alexnet_owt": 8,
    "densenet40": 40,
    "densenet121": 121,
    "googlenet_plain": 22,
    "inception_v4": 76,
    "overfeat": 8,
    "resnet:6,32,595,6": 3 * (6 + 32 + 595 + 6) + 2,
    **{
        name: int(name.removeprefix(family))
        for family in ("resnet", "vgg")
        for name in MODELS
        if name.startswith(family)
    },
}
"""Layers with weights on the longest way: what networks are named after."""


def depth(graph: Graph) -> int:
    longest = dict.fromkeys(graph.inputs, 0)
    for node in graph.nodes:
        before = max(longest[name] for name in node.inputs)
        weighted = node.op in ("conv", "matmul")
        longest.update(dict.fromkeys(node.outputs, before + weighted))
    return max(longest.values())


def persistent(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in graph.with_role(*PERSISTENT)}


def nbytes(graph: Graph, *ops: str) -> Iterator[int]:
    for node in graph.nodes:
        if node.op in ops:
            yield graph.tensors[node.outputs[0]].nbytes


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_published(name):
    if name not in COUNTS:
        assert name in ("vgg116", "vgg216", "vgg316", "vgg416")
        more = (int(name.removeprefix("vgg")) - 16) // 5
        groups = (64, 128, 256, 512, 512)
        each = sum(9 * c * c + c for c in groups)
        assert MODELS[name](1).parameter_count == COUNTS["vgg16"] + more * each
    else:
        assert MODELS[name](1).parameter_count == COUNTS[name]


@pytest.mark.parametrize("name", DEPTHS)
def test_it_is_as_deep_as_its_name_says(name):
    assert depth(get_model(name)(1)) == DEPTHS[name]


@given(*(st.integers(1, 5) for _ in range(4)))
@examples(10)
def test_the_family_of_any_depth(n1, n2, n3, n4):
    model = resnet_superneurons(n3, n1=n1, n2=n2, n4=n4)
    assert depth(model(1, image=71)) == 3 * (n1 + n2 + n3 + n4) + 2
    assert get_model(f"resnet:{n1},{n2},{n3},{n4}")(1, image=71) == model(1, image=71)


@pytest.mark.parametrize(
    ("name", "batch", "image", "mib"),
    [
        ("alexnet", 128, 227, 317.422),
        ("alexnet", 200, 227, 495.972),
        ("vgg16", 32, 227, 1681.922),
        ("vgg16", 32, 224, 1653.750),
    ],
)
def test_outputs_of_convolutions_are_as_large_as_superneurons_has_them(
    name, batch, image, mib
):
    graph = MODELS[name](batch, image=image)
    assert sum(nbytes(graph, "conv")) / 2**20 == pytest.approx(mib, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "batch", "gigabytes"),
    [
        ("alexnet_owt", 128, 0.38),
        ("alexnet", 128, 0.48),
        ("overfeat", 128, 0.58),
        ("vgg16", 64, 3.90),
        ("vgg116", 32, 17.62),
        ("vgg416", 32, 64.63),
    ],
)
def test_feature_maps_are_as_large_as_vdnn_has_them(name, batch, gigabytes):
    """Maps that are not computed in place, the image included."""
    graph = MODELS[name](batch)
    maps = sum(nbytes(graph, "conv", "max_pool", "matmul"))
    total = graph.tensors[IMAGE].nbytes + maps
    assert total / 1e9 == pytest.approx(gigabytes, abs=0.006)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_builds_and_has_all_gradients(case: Case):
    graph = case.graph()
    assert {IMAGE, LABEL} <= set(graph.inputs)
    assert graph.tensors[LABEL].dtype == "int64"
    assert graph.tensors[LABEL].shape[0] == case.batch
    assert len(graph.outputs) == 3
    assert all(graph.tensors[name].shape == () for name in graph.outputs)
    assert graph.initializers.keys() == persistent(graph).keys()
    trained = training_graph(graph)
    parameters = {spec.name: spec for spec in graph.with_role(Role.PARAMETER)}
    assert trained.gradients.keys() == parameters.keys()
    for name, gradient in trained.gradients.items():
        assert trained.tensors[gradient].shape == parameters[name].shape
        assert trained.tensors[gradient].dtype == "float64"
    assert trained.outputs == graph.outputs
    assert trained.initializers == graph.initializers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_out_of_training_it_takes_the_same_parameters(case: Case):
    graph, trained = case.graph(training=False), case.graph()
    known = persistent(trained)
    assert all(known[name] == shape for name, shape in persistent(graph).items())
    missing = known.keys() - persistent(graph).keys()
    assert all(name.startswith("side_") for name in missing)
    assert not {"dropout", "batch_norm"} & {node.op for node in graph.nodes}
    assert not any(node.mutates for node in graph.nodes)
    assert set(graph.inputs) == {IMAGE, LABEL, *persistent(graph)}


def test_side_heads_count_three_tenths():
    graph = MODELS["googlenet"](2, image=64)
    factors = [n.attrs["factor"] for n in graph.nodes if n.op == "scale"]
    assert factors == [0.3, 0.3]
    plain = MODELS["googlenet_plain"](2, image=64)
    missing = persistent(graph).keys() - persistent(plain).keys()
    assert missing
    assert all(name.startswith("side_") for name in missing)


def test_no_two_dropouts_have_one_mask():
    graph = MODELS["densenet40"](2, seed=7)
    seeds = [node.attrs["seed"] for node in graph.nodes if node.op == "dropout"]
    assert len(seeds) == len(set(seeds)) == 38
    assert min(seeds) == 7
    # The five best answers are counted of many classes.
    for classes, best in ((1000, [1, 5]), (10, [1])):
        nodes = MODELS["vgg16"](1, classes=classes).nodes
        assert [n.attrs["k"] for n in nodes if n.op == "accuracy"] == best


@pytest.mark.parametrize("image", [64, (64, 64), (3, 64, 64)])
def test_sizes_of_an_image_may_be_given_in_three_ways(image):
    assert MODELS["resnet18"](2, image=image) == MODELS["resnet18"](2, image=[64, 64])
    with pytest.raises(TypeError, match=r"batch must be an integer, got 2\.5"):
        MODELS["resnet18"](2.5, image=image)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vgg16", {"batch": 0}, "batch must be at least 1, got 0"),
        ("vgg16", {"batch": 1, "classes": 1}, "classes must be at least 2, got 1"),
        ("vgg16", {"batch": 1, "image": (3, 4, 5, 6)}, r"such as \(3, 224, 224\)"),
        ("vgg16", {"batch": 1, "image": 16}, "a window of 2 does not fit an image of"),
        ("vgg16", {"batch": 1, "image": 0}, "image must be at least 1"),
        ("alexnet", {"batch": 1, "image": 8}, "the padded input has only 8"),
        ("unet2d", {"batch": 1, "image": 40}, "multiples of 16"),
        ("vgg16", {"batch": 1, "dtype": "int8"}, "unknown dtype 'int8'"),
    ],
)
def test_sizes_that_do_not_fit(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        MODELS[name](**arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet19", "unknown model 'resnet19'; choose one of: .*resnet18.*vgg416"),
        ("resnet:1,2,3", "write four numbers of blocks, such as resnet:6,32,48,6"),
        ("resnet:1,2,x,4", "write four numbers"),
        ("resnet:1,0,2,3", r"every stage needs a block, got \(1, 0, 2, 3\)"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        get_model(name)


def test_a_bottleneck_of_the_family_steps_first():
    """Those of ImageNet step in the 3 x 3 (and both in their shortcuts)."""

    def stepping(graph: Graph) -> set[tuple[int, ...]]:
        problems = [n.attrs["problem"] for n in graph.nodes if n.op == "conv"][1:]
        return {p.w_shape[2:] for p in problems if math.prod(p.stride) > 1}

    assert stepping(get_model("resnet:1,2,3,1")(1)) == {(1, 1)}
    assert stepping(get_model("resnet50")(1)) == {(1, 1), (3, 3)}
