"""What the real cuDNN lists for an H200 that is only described: no GPU is needed.

Whatever might end the process (descriptions and plans that are not what they claim to
be) runs in a child.
"""

import dataclasses
import json
import re
from contextlib import suppress
from importlib.resources import files

import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.cuda import described_devices
from mucudnn.backends.cuda.conv import float32_sum
from mucudnn.backends.cuda.conv.graph_api import (
    configuration,
    engine_name,
    engines,
    operation_graph,
    parse_engine_name,
)
from mucudnn.backends.cuda.kernels.launch import Program, compiler_options
from mucudnn.errors import BackendUnavailableError, MucudnnError, UnsupportedError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.numerics import DOWN_CONVERT, NATIVE, TF32, Numerics
from mucudnn.passes.microbatch import aligned_batches
from mucudnn.suites import load_suite
from tests.commands import python
from tests.nvrtc import compiled

pytestmark = pytest.mark.cudnn

KIB = 1 << 10
DTYPES = ("float16", "bfloat16", "float32", "float64")
everywhere = pytest.mark.parametrize("direction", Direction)
layouts = pytest.mark.parametrize("layout", ["NCHW", "NHWC"])


@pytest.fixture(scope="module")
def h200(cudnn_library):
    return get_backend("cuda:h200")


@pytest.fixture(scope="module")
def listed(h200):
    """All engines for a problem, as `engines` gives them."""
    session = h200.conv.session

    def of(problem, **options):
        graph = operation_graph(session, problem, **{"accumulate": False, **options})
        return engines(session, graph, problem.dtype)

    return of


def conv2(batch=256, direction=Direction.FORWARD, **options):
    """AlexNet's second layer: 64 -> 192 channels, 5x5, on 27x27."""
    shapes = {"x_shape": (batch, 64, 27, 27), "w_shape": (192, 64, 5, 5)}
    return ConvProblem(direction=direction, **{**shapes, "padding": 2, **options})


def sampled(suite, every):
    return [
        pytest.param(layer.problem, id=f"{suite}-{i}")
        for i, layer in enumerate(load_suite(suite))
        if i % every == 0
    ]


# --- enumeration ---------------------------------------------------------------------


def check_rows(h200, problem, least):
    """Names are unique, parse back, and rebuild a configuration of the same bytes."""
    rows = h200.conv.algorithms(problem)
    plain = dict(r for r in rows if not r[0].endswith(float32_sum.SUFFIX))
    assert len(plain) >= least
    assert len(dict(rows)) == len(rows)
    session = h200.conv.session
    # A filter gradient's engine has enough to add to earlier micro-batches as well.
    ways = (False, True) if problem.direction is Direction.BACKWARD_FILTER else (False,)
    graphs = [operation_graph(session, problem, accumulate=way) for way in ways]
    for name, nbytes in plain.items():
        assert engine_name(*parse_engine_name(name)) == name
        sizes = []
        for graph in graphs:
            with suppress(MucudnnError):  # a few engines cannot add
                config = configuration(session, graph, name)
                sizes += config.get("WORKSPACE_SIZE")
        assert max(sizes) == nbytes, name
        assert nbytes >= 0


@everywhere
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", sampled("alexnet", 2))
def test_alexnet(problem, dtype, layout, direction, h200):
    problem = dataclasses.replace(
        problem, direction=direction, dtype=dtype, layout=layout
    )
    check_rows(h200, problem, least=3 if dtype == "float64" else 15)


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "problem", sampled("deepbench_train", 19) + sampled("deepbench_inference", 29)
)
def test_deepbench(problem, dtype, direction, h200):
    problem = dataclasses.replace(problem, direction=direction, dtype=dtype)
    check_rows(h200, problem, least=8)


SHAPES = {
    "1-D": {"x_shape": (8, 64, 300), "w_shape": (64, 64, 9), "padding": 4},
    "3-D": {"x_shape": (2, 16, 12, 14, 16), "w_shape": (32, 16, 3, 3, 3)},
    "groups": {"x_shape": (8, 64, 14, 14), "w_shape": (64, 2, 3, 3), "groups": 32},
    "depthwise": {"x_shape": (8, 64, 14, 14), "w_shape": (64, 1, 3, 3), "groups": 64},
    "dilation": {"x_shape": (8, 64, 14, 14), "w_shape": (64, 64, 3, 3), "dilation": 2},
    "stride": {"x_shape": (8, 3, 224, 224), "w_shape": (64, 3, 7, 7), "stride": 2},
    "1x1": {"x_shape": (8, 256, 14, 14), "w_shape": (64, 256, 1, 1)},
    "odd": {"x_shape": (7, 3, 13, 11), "w_shape": (5, 3, 2, 3)},
    "one sample": {"x_shape": (1, 8, 9, 9), "w_shape": (8, 8, 3, 3)},
}


@everywhere
@layouts
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_of_all_kinds(shape, dtype, layout, direction, h200):
    problem = ConvProblem(direction=direction, dtype=dtype, layout=layout, **shape)
    check_rows(h200, problem, least=2)


def test_names_that_are_no_engines(h200):
    for name in ("GEMM", "eng", "eng1_k2", "eng1_k2=", "eng-1", "eng1_k2=3 "):
        with pytest.raises(UnsupportedError, match="not an engine"):
            parse_engine_name(name)
        with pytest.raises(UnsupportedError, match="no algorithm"):
            h200.conv.traits(conv2(), name)


def test_engines_that_do_not_exist_are_refused(h200):
    for name in ("eng9999", "eng0_k2=77", "eng28_k2=-5"):
        with pytest.raises(MucudnnError):
            h200.conv.dumps(conv2(8), name)


def test_what_is_not_there_is_said(h200):
    assert "only described" in dict(h200.conv.excluded(conv2()))["first API"]
    with pytest.raises(BackendUnavailableError, match="without a device"):
        h200.device.allocate(1)
    with pytest.raises(
        BackendUnavailableError, match="this device cannot run anything"
    ):
        h200.conv.launches(conv2(), "eng0", None, first=True, accumulate=False)


# --- workspaces ----------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_channels_first_workspace_grows_with_the_batch(dtype, direction, h200):
    """Tensor-core engines transpose; this is what micro-batching lives on."""
    greatest = []
    for batch in (1, 4, 16, 64, 256):
        problem = conv2(batch, direction, dtype=dtype)
        greatest.append(
            max(
                nbytes
                for name, nbytes in h200.conv.algorithms(problem)
                if "tensor_core" in h200.conv.traits(problem, name).notes
            )
        )
    assert greatest == sorted({*greatest})
    assert greatest[-1] > 4 * greatest[0]


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize("batch", [1, 16, 256])
def test_strict_float32_needs_next_to_nothing(batch, direction, h200):
    problem = conv2(batch, direction)
    strict = Numerics.parse("strict")
    accepted = {
        name: nbytes
        for name, nbytes in h200.conv.algorithms(problem)
        if strict.refusal(h200.conv.traits(problem, name)) is None
    }
    small = [nbytes for nbytes in accepted.values() if nbytes <= 64 * KIB]
    assert len(small) >= 3
    explicit = {parse_engine_name(n)[0] for n, b in accepted.items() if b > 64 * KIB}
    assert explicit <= {2}  # the one that writes all patches out


@everywhere
def test_channels_last_can_do_without(direction, h200):
    problem = conv2(256, direction, layout="NHWC", dtype="float16")
    rows = h200.conv.algorithms(problem)
    free = [
        name
        for name, nbytes in rows
        if nbytes <= 64 * KIB and "tensor_core" in h200.conv.traits(problem, name).notes
    ]
    assert free


# --- numbers -------------------------------------------------------------------------


@everywhere
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_traits(dtype, layout, direction, h200):
    problem = conv2(16, direction, dtype=dtype, layout=layout)
    lossless, strict = Numerics(), Numerics.parse("strict")
    modes = set()
    for name, _ in h200.conv.algorithms(problem):
        traits = h200.conv.traits(problem, name)
        modes.add(traits.math_mode)
        core = "tensor_core" in traits.notes
        if dtype == "float32" and core:
            assert traits.math_mode in (TF32, DOWN_CONVERT)
            assert strict.refusal(traits)
        elif traits.math_mode == TF32:
            pytest.fail(f"{name} is {traits}")
        if traits.math_mode == DOWN_CONVERT:
            assert "narrower" in lossless.refusal(traits)
        assert traits.deterministic == ("nondeterministic" not in traits.notes)
        assert not any("numerical_note_" in note for note in traits.notes)
    assert NATIVE in modes
    assert (TF32 in modes) == (dtype == "float32")


@everywhere
def test_half_sums_are_marked(direction, h200):
    problem = conv2(8, direction, dtype="float16")
    marked = [n for n, _ in h200.conv.algorithms(problem) if n.endswith("+f32")]
    assert bool(marked) == (direction is Direction.BACKWARD_FILTER)


@everywhere
@layouts
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nearly_every_engine_adds_to_its_output(dtype, layout, direction, h200, listed):
    problem = conv2(8, direction, dtype=dtype, layout=layout)
    session = h200.conv.session
    graph = operation_graph(session, problem, accumulate=True)
    names = list(listed(problem))
    refused = []
    for name in names:
        try:
            configuration(session, graph, name)
        except MucudnnError:
            refused.append(name)
    assert len(refused) <= len(names) / 10, refused


# --- alignment -----------------------------------------------------------------------


@everywhere
def test_channels_last_loses_its_engines_when_misaligned(direction, listed):
    problem = conv2(8, direction, dtype="float16", layout="NHWC")
    counts = {n: len(listed(problem, alignment=n)) for n in (16, 8, 2)}
    assert counts[2] <= counts[8] < counts[16] / 3
    first = dataclasses.replace(problem, layout="NCHW")
    assert len(listed(first, alignment=2)) > counts[16] / 2


@pytest.mark.parametrize("batch", [32, 48])
def test_odd_half_images_keep_their_engines_when_divided(batch, listed):
    """Divided at aligned sizes, each part has what an aligned problem has."""
    problem = conv2(
        batch,
        dtype="float16",
        layout="NHWC",
        x_shape=(batch, 3, 27, 27),
        w_shape=(8, 3, 5, 5),
    )
    sizes = aligned_batches(problem, range(1, batch + 1), 16)
    assert sizes == tuple(range(8, batch + 1, 8))
    part = problem.with_batch(8)
    assert len(listed(part)) > 3 * len(listed(part, alignment=2))


# --- plans as text -------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_plans_survive_as_text(dtype, direction, h200):
    """In a backend of its own, which has built no plan yet."""
    problem = conv2(8, direction, dtype=dtype)
    other = get_backend("cuda:h200").conv
    written = 0
    for name, _ in h200.conv.algorithms(problem)[:12]:
        if "runtime_compilation" in h200.conv.traits(problem, name).notes:
            continue  # needs a driver
        text = h200.conv.dumps(problem, name)
        assert json.loads(text)["cudnnVersion"] // 10000 == 9
        other.loads(problem, name, text)
        assert other.dumps(problem, name) == text
        written += 1
    assert written


def child(code):
    """Run code that may crash; its output, line by line."""
    return python("-c", code)[0].splitlines()


BAD_TEXTS = """
import json
from mucudnn.backends import get_backend
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import ConvProblem, Direction
conv = get_backend("cuda:h200").conv
problem = ConvProblem(
    direction=Direction.FORWARD, x_shape=(8, 64, 27, 27), w_shape=(192, 64, 5, 5)
)
name = next(n for n, _ in conv.algorithms(problem))
text = conv.dumps(problem, name)
older = json.dumps({**json.loads(text), "cudnnVersion": 91300})
for bad in ("", "{}", "[]", "null", "nonsense", text[:100], text[:-5], older):
    try:
        conv.loads(problem, name, bad)
    except MucudnnError as e:
        print("refused", flush=True)
    else:
        print("took", bad[:40], flush=True)
"""


def test_texts_that_are_no_plans_are_refused(cudnn_library):
    assert child(BAD_TEXTS) == ["refused"] * 8


# --- descriptions --------------------------------------------------------------------


BAD_DESCRIPTIONS = """
import json
from mucudnn.backends import get_backend
for path in PATHS:
    try:
        get_backend("cuda:" + path).conv
    except Exception as e:
        print(type(e).__name__, str(e).replace(chr(10), " "), flush=True)
    else:
        print("took", path, flush=True)
"""


def test_bad_descriptions_are_refused(tmp_path, cudnn_library):
    name = described_devices()[-1]
    good = json.loads(
        files("mucudnn.backends.cuda").joinpath(f"devices/{name}.json").read_text()
    )
    cases = ["", "nonsense", "{}", "[]", "null", json.dumps(good)[:-9]]
    cases += [
        json.dumps({k: v for k, v in good.items() if k != key})
        for key in ("deviceVer", "deviceName", "multiProcessorCount")
    ]
    cases += [json.dumps({**good, "deviceVer": version}) for version in (-1, 100, 350)]
    cases.append(json.dumps({**good, "multiProcessorCount": "many"}))
    paths = []
    for i, text in enumerate(cases):
        path = tmp_path / f"{i}.json"
        path.write_text(text)
        paths.append(str(path))
    paths.append(str(tmp_path / "missing.json"))
    lines = child(f"PATHS = {paths!r}\n{BAD_DESCRIPTIONS}")
    assert len(lines) == len(paths)
    for line, path in zip(lines, paths, strict=True):
        assert line.startswith("BackendUnavailableError"), (path, line)
    assert re.search(r"h100.*, h200.*", lines[-1])


def test_a_description_of_an_h100_lists_what_fits(cudnn_library):
    h100 = get_backend("cuda:h100")
    assert h100.device.name == "NVIDIA H100 80GB HBM3"
    rows = h100.conv.algorithms(conv2(32))
    assert len(rows) > 40
    assert min(nbytes for _, nbytes in rows) == 0


def test_descriptions_are_named_by_a_prefix_and_by_a_file(tmp_path, h200):
    (name,) = (one for one in described_devices() if one.startswith("h200"))
    text = files("mucudnn.backends.cuda").joinpath(f"devices/{name}.json").read_text()
    path = tmp_path / "mine.json"
    path.write_text(text)
    for argument in (name, path):
        other = get_backend(f"cuda:{argument}")
        assert other.device.fingerprint == h200.device.fingerprint
        assert other.conv.algorithms(conv2(4)) == h200.conv.algorithms(conv2(4))


# --- our own kernels -----------------------------------------------------------------


def test_the_float32_sums_compile():
    for dtype in ("float16", "bfloat16"):
        options = compiler_options(dtype, wide=True)
        for code in compiled(float32_sum.PROGRAM.source, "sums", options):
            assert b"sum_parts" in code


def test_the_spin_compiles():
    source = Program.load("spin.cu").source
    assert all(b"spin" in code for code in compiled(source, "spin"))
