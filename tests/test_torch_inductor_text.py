"""The text that Inductor writes: what each kind of line reads, makes and changes."""

import re
import warnings

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():  # PyTorch's own, as its modules are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor.select_algorithm import extern_kernels

    from mucudnn.torch.inductor.compiling import CompiledHalf
    from mucudnn.torch.inductor.in_place import candidates, keeps_bits
    from mucudnn.torch.inductor.wrapper_text import read_wrapper

from mucudnn.torch.costs.measure import evaluate  # noqa: E402
from mucudnn.torch.lowering.lowered import Layout, NotCompiledError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::Warning")]

NEW = "empty_strided_cpu((4, 4), (4, 1), torch.float32)"
WHERE = "static_cast<int64_t>(x1 + 4L*x0)"

KERNEL = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C" void kernel(const float* in_ptr0, float* out_ptr0)
{{
    for(;;) {{ {body} }}
}}
''')
class Runner:
    def call(self, args):
        {lines}
"""
SAME = f"auto t = at::load(in_ptr0 + {WHERE}); t.store(out_ptr0 + {WHERE});"


def double(given, made):
    made.copy_(given.mul(2))


def wrapper(*lines, given=("x", "y"), kernel=double, body=SAME):
    """Read a wrapper with these lines."""
    text = [f"{', '.join(given)} = args", "args.clear()", *lines]
    if not lines[-1].startswith("return"):
        text.append("return (x, )")
    source = KERNEL.format(body=body, lines="\n        ".join(text))
    space = {
        "torch": torch,
        "aten": torch.ops.aten,
        "extern_kernels": extern_kernels,
        "empty_strided_cpu": torch._C._dynamo.guards._empty_strided_cpu,
        "reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor,
        "cpp_fused_0": kernel,
    }
    half = CompiledHalf(source, space, given, ())
    return read_wrapper(half, "f_", given)


LINES = {
    "a kernel": (
        [f"a = {NEW}", "cpp_fused_0(x, a)", "del x"],
        (["x"], ["f_a"], [], lambda x, y: (x * 2,)),
    ),
    "a kernel of views": (
        [
            f"a = {NEW}",
            "b = reinterpret_tensor(a, (4, 4), (1, 4), 0)",
            "cpp_fused_0(reinterpret_tensor(x, (4, 4), (1, 4), 0), b)",
        ],
        (["x"], ["f_a"], [], lambda x, y: (x * 2,)),
    ),
    "an operation with out": (
        [f"a = {NEW}", "extern_kernels.mm(x, y, out=a)"],
        (["x", "y"], ["f_a"], [], lambda x, y: (x @ y,)),
    ),
    "an operation with a result": (
        ["a = torch.ops.aten.add.Tensor(x, y, alpha=2)"],
        (["x", "y"], ["f_a"], [], lambda x, y: (x + 2 * y,)),
    ),
    "views": (
        [
            "b = torch.ops.aten.t.default(x)",
            "c = torch.ops.aten.split.Tensor(b, 2)",
            "d = c[1]",
            "a = torch.ops.aten.cat.default([b, d])",
        ],
        (["x"], ["f_a"], [], lambda x, y: (torch.cat([x.T, x.T[2:]]),)),
    ),
    "an operation with several results": (
        ["a = torch.ops.aten.max.dim(x, 1)", "b = a[0]", "c = a[1]", "del a"],
        (["x"], ["f_b", "f_c"], [], lambda x, y: tuple(x.max(1))),
    ),
    "random numbers": (
        [
            "a = empty_strided_cpu((1, ), (1, ), torch.int64)",
            "aten.randint.low_out(-(2**63), 2**63 - 1, [1], out=a)",
        ],
        ([], ["f_a"], [], None),
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_has_its_operands_and_results(name):
    lines, (operands, results, changes, expected) = LINES[name]
    (line,) = wrapper(*lines).lines
    assert [*line.operands] == operands
    assert [*line.results] == results
    assert [*line.changes] == changes
    assert line.random == (name == "random numbers")
    assert line.pure != line.random
    torch.manual_seed(0)
    values = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    found = line.function(*(values[v] for v in line.operands))
    if expected is not None:
        found = found if isinstance(found, tuple) else (found,)
        assert all(map(torch.equal, found, expected(**values)))


CONVOLUTIONS = {
    "forward": (
        "a = extern_kernels.convolution(x, y, stride=(2, 2), padding=(1, 1), "
        "dilation=(1, 1), transposed=False, output_padding=(0, 0), groups=1, bias=z)",
        ["f_a"],
    ),
    "backward": (
        "a = torch.ops.aten.convolution_backward.default(w, x, y, [4], [2, 2], "
        "[1, 1], [1, 1], False, [0, 0], 1, [True, True, True])\n"
        "b = a[0]\nc = a[2]",
        ["f_b", "f_c"],
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_also_a_call_of_pytorchs(name):
    text, results = CONVOLUTIONS[name]
    (line,) = wrapper(*text.split("\n"), given="wxyz").lines
    assert [*line.results] == results
    shapes = {"w": (2, 4, 4, 4), "x": (2, 3, 8, 8), "y": (4, 3, 3, 3), "z": (4,)}
    given = [torch.randn(shapes[v]) for v in line.operands]
    expected = line.function(*given)
    if name == "forward":
        expected = (expected,)
    assert all(map(torch.equal, evaluate(line.convolution, given), expected))


def test_a_convolution_of_views_is_an_ordinary_line():
    view = "reinterpret_tensor(x, (1, 4, 4), (16, 4, 1), 0)"
    text = CONVOLUTIONS["forward"][0].replace("(x,", f"({view},")
    (line,) = wrapper(text, given="xyz").lines
    assert line.convolution is None


def test_a_second_kernel_changes_what_the_first_has_made():
    part = "reinterpret_tensor(a, (4, 2), (4, 1), {})"
    first, second = wrapper(
        f"a = {NEW}",
        f"b = {part.format(0)}",
        "cpp_fused_0(x, b)",
        f"c = {part.format(2)}",
        "cpp_fused_0(y, c)",
        "return (a, reinterpret_tensor(a, (2, ), (1, ), 1), None, )",
    ).lines
    assert [first.results, second.results] == [["f_a"], []]
    assert second.changes == ["f_a"]
    assert not second.pure
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    whole = first.function(x)
    second.function(y, whole)
    assert torch.equal(whole, 2 * torch.cat([x, y], 1))


@pytest.mark.parametrize(
    "line",
    [
        "with torch.no_grad():\n            pass",
        "triton_poi_fused_0.run(x, y, 16, stream=stream0)",
        "s0 = x.size()[0]",
        "extern_kernels.something_else(x, y)",
        "print(x)",
        "cpp_fused_0(x)",
        "if x: pass",
    ],
)
def test_a_line_that_is_not_known_is_quoted(line):
    words = re.escape(line.partition("a = ")[2] or line.partition(":")[0])
    with pytest.raises(NotCompiledError, match=f"does not know this line.*{words}"):
        wrapper(line)


SHIFTED = SAME.replace(
    "in_ptr0 + static_cast<int64_t>(", "in_ptr0 + static_cast<int64_t>(1L + "
)


@pytest.mark.parametrize(
    ("body", "found"), [(SAME, ["x"]), (SHIFTED, []), (SAME + " g(in_ptr0);", [])]
)
def test_a_result_may_overwrite_what_is_read_at_the_same_addresses(body, found):
    (line,) = wrapper(f"a = {NEW}", "cpp_fused_0(x, a)", body=body).lines
    layout = Layout.of(torch.ones(4, 4))
    sizes = {"x": 1 << 13, "f_a": 1 << 13}
    assert candidates(line, "f_a", {"x": layout}, sizes) == found
    assert not candidates(line, "f_a", {"x": layout}, {**sizes, "x": 64})


def late(given, made):
    """Read the operand again behind the first result."""
    made.copy_(given.mul(2))
    made.add_(given)


@pytest.mark.parametrize(("kernel", "kept"), [(double, True), (late, False)])
def test_a_pair_is_dropped_unless_its_bits_are_equal(kernel, kept):
    (line,) = wrapper(
        f"a = {NEW}", "cpp_fused_0(x, a)", kernel=kernel, body=f"{SAME} // {kept}"
    ).lines
    x = torch.rand(4, 4)
    before = x.clone()
    assert keeps_bits(line, "x", [x]) == kept
    assert torch.equal(x, before)


TRITON = """
triton_{kind}_fused_0 = async_compile.triton('triton_{kind}_fused_0', '''
@triton_heuristics.{heuristic}(
    triton_meta={{'signature': {{'in_ptr0': '*fp32', '{out}': '*fp32', 'n': 'i32'}}}},
)
@triton.jit
def triton_{kind}_fused_0(in_ptr0, {out}, n, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + ({read}), x0 < n)
    tl.store({out} + (x0), tmp0 * 2, x0 < n)
''', device_str='cuda')
def call(args):
    x, = args
    args.clear()
    with {guard}(1):
        torch.cuda.set_device(1)
        x = copy_if_misaligned(x)
        a = empty_strided_cuda((32, 64), (64, 1), torch.float32)
        stream1 = get_raw_stream(1)
        triton_{kind}_fused_0.run(x, a, 2048, stream=stream1)
        del x
    return (a, )
"""


def triton_line(**changed):
    """Read a wrapper for a GPU that has one kernel."""
    words = {
        "kind": "poi", "heuristic": "pointwise", "out": "out_ptr0", "read": "x0",
        "guard": "torch.cuda._DeviceGuard",
    }  # fmt: skip
    source = TRITON.format(**{**words, **changed})
    (line,) = read_wrapper(CompiledHalf(source, {}, ("x",), ()), "f_", "x").lines
    return line


def test_a_triton_kernel_has_its_operands_and_results():
    line = triton_line()
    assert (line.name, line.operands, line.results) == (
        "triton_poi_fused_0",
        ["x"],
        ["f_a"],
    )
    layout = line.layouts["f_a"]
    assert (layout.shape, layout.device) == ((32, 64), torch.device("cuda", 1))
    assert line.pure


@pytest.mark.parametrize(
    ("changed", "safe"),
    [
        ({}, True),
        ({"read": "x0 + 1"}, False),
        ({"kind": "per", "heuristic": "persistent_reduction"}, False),
    ],
)
def test_a_triton_kernel_may_overwrite_what_it_reads_at_one_address(changed, safe):
    line = triton_line(**changed)
    layouts = {"x": line.layouts["f_a"], **line.layouts}
    found = candidates(line, "f_a", layouts, dict.fromkeys(layouts, 8192))
    assert found == ["x"] * safe


@pytest.mark.parametrize("changed", [{"out": "result"}, {"guard": "torch.no_grad"}])
def test_a_triton_kernel_that_is_not_understood_is_refused(changed):
    with pytest.raises(NotCompiledError, match="does not know"):
        triton_line(**changed)
