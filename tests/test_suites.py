"""Suites and CSV files against published facts about the networks they list."""

import csv
import io
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import mucudnn.suites
from mucudnn.ir.conv import Direction
from mucudnn.suites import (
    SUITES,
    load_suite,
    parse_problem,
    read_layers_file,
    short_name,
)
from mucudnn.suites.layers import read_layers
from tests.conv_problems import conv_problems

# Multiply-adds of one image's convolutions, as the papers and model cards give them.
GMACS = {"resnet18": 1.81, "resnet50": 4.09, "vgg16": 15.35}
CONVOLUTIONS = {"alexnet": 5, "vgg16": 13, "resnet18": 20, "resnet50": 53}


@pytest.mark.parametrize("name", SUITES)
def test_names_are_distinct_and_shapes_are_2d_or_3d(name):
    layers = load_suite(name)
    assert len({layer.name for layer in layers}) == len(layers)
    rank = 3 if name == "unet3d" else 2
    for layer in layers:
        assert layer.problem.direction is Direction.FORWARD
        assert len(layer.problem.x_shape) == 2 + rank
    files = Path(mucudnn.suites.__file__).parent.glob("*.csv")
    assert {file.stem for file in files} == set(SUITES)
    with pytest.raises(ValueError, match=r"'nope'.*alexnet.*unet3d"):
        load_suite("nope")


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_networks_list_every_distinct_convolution_once_and_do_the_published_work(name):
    layers = load_suite(name)
    assert sum(layer.count for layer in layers) == CONVOLUTIONS[name]
    assert len({layer.problem for layer in layers}) == len(layers)
    flops = sum(x.count * x.problem.with_batch(1).flops for x in layers)
    assert name == "alexnet" or flops / 2e9 == pytest.approx(GMACS[name], rel=0.01)


def test_alexnet_is_the_one_tower_form():
    layers = load_suite("alexnet")
    assert [x.problem.w_shape[0] for x in layers] == [64, 192, 384, 384, 256]
    assert [x.problem.x_shape[2] for x in layers] == [224, 27, 13, 13, 13]
    assert {x.problem.batch for x in layers} == {256}
    assert layers[0].problem.y_shape[2:] == (55, 55)


def test_unet_levels_join():
    layers = {x.name: x.problem for x in load_suite("unet3d")}
    for upper, lower in (("2", "3"), ("1", "2")):
        skip = layers[f"down{upper}_2"].w_shape[0]
        below = layers[f"up{lower}_2"].w_shape[0]
        assert layers[f"up{upper}_1"].x_shape[1] == skip + below
    assert {p.w_shape[2:] for p in layers.values()} == {(3, 3, 3)}
    assert all(p.y_shape[2:] == p.x_shape[2:] for p in layers.values())


def test_deepbench_has_its_published_mix():
    train = [x.problem for x in load_suite("deepbench_train")]
    assert (
        load_suite("deepbench_train")[11].name == "deepbench_train/12:60x6x64-128-3x3"
    )
    assert len(train) == 94
    assert len(set(train)) == 90
    assert Counter(p.batch for p in train) == {16: 52, 8: 38, 4: 2, 32: 2}
    kernels = Counter(p.w_shape[2:] for p in train)
    square = {(1, 1): 45, (3, 3): 33, (5, 5): 7, (7, 7): 1}
    assert kernels == square | {(5, 20): 4, (5, 10): 4}
    inference = [x.problem for x in load_suite("deepbench_inference")]
    assert len(inference) == 107
    assert Counter(p.batch for p in inference) == {1: 57, 2: 48, 4: 2}


def problems():
    return conv_problems().map(lambda p: p.with_direction(Direction.FORWARD))


def fields(problem):
    """What a person would write for the problem."""
    rank = len(problem.x_shape) - 2
    axes = ["d", "h", "w"][3 - rank :]
    found = {"n": problem.x_shape[0], "c": problem.x_shape[1], "k": problem.w_shape[0]}
    found |= dict(zip(axes, problem.x_shape[2:], strict=True))
    found |= dict(zip(["t", "r", "s"][3 - rank :], problem.w_shape[2:], strict=True))
    for word, values in (
        ("stride", problem.stride),
        ("pad", problem.padding),
        ("dilation", problem.dilation),
    ):
        found |= {f"{word}_{a}": v for a, v in zip(axes, values, strict=True)}
    found |= {"groups": problem.groups}
    return found | {"dtype": problem.dtype, "layout": problem.layout}


@given(problems())
def test_problem_text_round_trips(problem):
    text = ",".join(f"{k}={v}" for k, v in fields(problem).items())
    assert parse_problem(text) == problem
    short = parse_problem("n=2,c=3,h=9,w=9,k=4,r=3,s=3,pad=1,stride=2,pad_h=0")
    assert (short.padding, short.stride) == ((0, 1), (2, 2))


@given(st.lists(problems(), min_size=1, max_size=5), st.randoms())
def test_csv_round_trips_whatever_the_column_order(asked, random):
    keys = sorted({key for problem in asked for key in fields(problem)})
    random.shuffle(keys)
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, restval="")
    writer.writeheader()
    writer.writerows(fields(problem) for problem in asked)
    lines = text.getvalue().splitlines(keepends=True)
    assert [x.problem for x in read_layers(lines, "f", "f.csv")] == asked


ROW = "700,161,1,4,32,20,5,0,0,2,2"
DIALECTS = {
    "by position": f"{ROW}\n",
    "by position, more columns": f"{ROW},0.1,DeepSpeech\n",
    "deepbench": f"w,h,c,n,k,filter_w,filter_h,pad_w,pad_h,stride_w,stride_h\n{ROW}\n",
    "ucudnn": "source,W,H,C_in,N,C_out,kernel_w,kernel_h,pad_w,pad_h,stride_w,"
    f"stride_h\nDeepSpeech,{ROW}\n",
    "ours": "set,application,n,c,h,w,k,r,s,stride\n"
    "train,DeepSpeech,4,1,161,700,32,5,20,2\n",
}


@pytest.mark.parametrize("text", DIALECTS.values(), ids=DIALECTS)
def test_dialects_agree(tmp_path, text):
    file = tmp_path / "some.csv"
    file.write_text(f"# comment\n\n{text}")
    (layer,) = read_layers_file(file)
    assert layer.problem == load_suite("deepbench_train")[0].problem


def test_repeated_names_give_way_to_shapes(tmp_path):
    file = tmp_path / "apps.csv"
    file.write_text("name,n,c,w,k,s\nOCR,1,2,9,4,3\nOCR,1,2,8,4,3\nface,1,2,9,4,3\n")
    names = [layer.name for layer in read_layers_file(file)]
    assert names == ["apps/1:9x2-4-3", "apps/2:8x2-4-3", "face"]
    wide = parse_problem("n=1,c=3,d=4,h=5,w=6,k=7,t=1,r=2,s=3")
    assert short_name(wide) == "6x5x4x3-7-3x2x1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n,c,w,k,s\n1,2,x,4,3\n", r"bad\.csv:2: column 'w' is 'x'"),
        ("n,c,w,k,s\n1,2,9,4\n", r"bad\.csv:2: 4 cells for 5 columns"),
        ("n,c,w,k,s\n1,2,9,4,30\n", r"bad\.csv:2: .*30.*9"),
        ("n,c,w,k,s\n1,0,9,4,3\n", r"bad\.csv:2: column 'c' is 0; the least is 1"),
        ("n,c,w,k\n1,2,9,4\n", r"bad\.csv:2: s missing"),
        (
            "n,c,w,k,s,q\n1,2,9,4,3,1\n",
            r"bad\.csv:1: unknown column 'q'; known columns are",
        ),
        ("n,c,w,k,s,W\n1,2,9,4,3,1\n", r"bad\.csv:1: two columns for 'w'"),
        ("n,c,w,k,s,count\n1,2,9,4,3,0\n", r"bad\.csv:2: column 'count' is '0'"),
        ("n,c,w,k,s,stride_h\n1,2,9,4,3,2\n", r"bad\.csv:2: stride_h is given"),
        ("n,c,w,k,s,groups\n1,3,9,4,3,2\n", r"bad\.csv:2: 3 channels .* 2 groups"),
        ("n,c,w,k,s,dtype\n1,3,9,4,3,int9\n", r"bad\.csv:2: unknown dtype 'int9'"),
        ("n,c,w,k,s\n", r"bad\.csv has no layers"),
        ("", r"bad\.csv has no layers"),
        ("\udcff\udcfe\0", r"bad\.csv is not UTF-8"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path, text, message):
    file = tmp_path / "bad.csv"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        read_layers_file(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n=1,c=2,w=9,k=4,s=3,q=1", "unknown key 'q'; valid keys: n, c, d"),
        ("n=1,c=2,w=9,k=4", "s missing; a 1-D convolution needs"),
        ("n=1,c=2,h=9,w=9,k=4,s=3", "r missing; a 2-D"),
        ("n=1,n=2", "'n' is given twice"),
        ("n", "'n' is not of the form key=value"),
        ("n=,c=2", "'n=' is not of the form"),
        ("n=1.5,c=2,w=9,k=4,s=3", "n is '1.5', not an integer"),
        ("n=1,c=2,w=9,k=4,s=3,pad=-1", "pad is -1; the least is 0"),
    ],
)
def test_problem_errors_say_what_would_work(text, message):
    with pytest.raises(ValueError, match=message):
        parse_problem(text)
