"""Nodes say what they are: our own by one table, those of others by themselves."""

import ast
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mucudnn
from mucudnn.backends import get_backend
from mucudnn.backends.cpu.kernels import KERNELS as CPU_KERNELS
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import Direction
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.operations import OPERATIONS, traits_of
from mucudnn.ir.schedule import Alloc, Free, SwapIn, SwapOut
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import OPAQUE, Batch, NodeTraits
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import RULES, training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.rematerialize import Rematerializer
from mucudnn.passes.liveness import live_ranges, uses_of
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import RECOMPUTED, Residency, policy_names, saved_tensors
from mucudnn.passes.scheduling.problem import origin
from tests.conv_problems import conv_problem
from tests.examples import examples
from tests.graphs import Symbols, graphs
from tests.kernel_cases import KERNELS, close
from tests.mirror_cases import cases, compute
from tests.numpy_runner import execute
from tests.random_graphs import feeds, foreign, profiles, residencies, training_graphs
from tests.schedule_oracle import verify
from tests.sources import sources

BY_NAME = {
    "passes.estimate": {"conv", "matmul"},  # their arithmetic
    "passes.graph.precision": {
        "conv",
        "cast",
        "to_channels_last",
    },  # its problem's data type
    # Those that copies make needless, and what turns gradients back for an update.
    "passes.graph.updates": {"cast", "to_channels_first"},
    # its attributes
    "passes.graph.autodiff": {"RULES"},  # the derivative of each
    # Whose gradients are timed as well; a parameter that is cast is one still.
    "passes.graph.layouts": {"RULES", "cast"},
    "ir.operations": {"OPERATIONS"},
    "ir.channels_last": {"OPERATIONS"},
    "ir.layers": {"dropout"},  # each has another seed
}
"""Where the meaning of one operation is needed, not what kind of operation it is."""

UNCUT = {
    *("accumulate", "adagrad", "adam", "momentum", "rmsprop", "sgd"),
    *("adjust_loss_scale", "find_overflow"),
    *("batch_norm", "batch_norm_grad", "batch_norm_merge", "fill"),
    *("batch_norm_relu", "batch_norm_relu_grad"),
    *("batch_norm_add_relu", "batch_norm_add_relu_grad"),
    *("group_norm_sums", "group_norm_merge", "group_norm_apply"),
    *("group_norm_grad_sums", "group_norm_grad_apply"),
}
"""Operations that are not cut along the batch by themselves."""


def compared(tree):
    """What the operations of nodes are compared with, or looked up in."""

    def is_op(expression):
        if isinstance(expression, ast.Name):
            return expression.id == "op"
        return isinstance(expression, ast.Attribute) and expression.attr == "op"

    for node in ast.walk(tree):
        match node:
            case ast.Compare(left, _, others) if any(map(is_op, (left, *others))):
                found = [x for x in (left, *others) if not is_op(x)]
            case ast.Call(ast.Attribute(table, "get"), [key, *_]) if is_op(key):
                found = [table]
            case ast.Subscript(table, key) if is_op(key):
                found = [table]
            case ast.Match(subject) if is_op(subject):
                found = [case.pattern for case in node.cases]
            case _:
                continue
        for expression in found:
            for part in ast.walk(expression):
                if isinstance(part, ast.Constant | ast.Name):
                    yield part.value if isinstance(part, ast.Constant) else part.id


def test_no_pass_knows_operations_by_name():
    found = {
        module.removeprefix("mucudnn."): set(compared(tree))
        for module, tree in sources().items()
        if f"{module}.".startswith(("mucudnn.ir.", "mucudnn.passes."))
    }
    assert {module: names for module, names in found.items() if names} == BY_NAME


def test_the_table_has_every_operation_that_is_computed():
    assert OPERATIONS.keys() == CPU_KERNELS.keys() | {"conv", "reshape"}
    assert OPERATIONS.keys() > RULES.keys()


def part(array, axis, rows):
    return array if axis is None else array[(slice(None),) * axis + (rows,)]


def cut(case, batch, rows, attrs):
    """A case on some samples; its results."""
    inputs = [
        np.array(part(array, axis, rows), order="C")
        for array, axis in zip(case.inputs, batch.inputs, strict=True)
    ]
    outputs = []
    for (shape, dtype), axis in zip(case.outputs, batch.outputs, strict=True):
        sizes = list(shape)
        if axis is not None:
            sizes[axis] = rows.stop - rows.start
        outputs.append((tuple(sizes), dtype))
    return compute(KERNELS[case.op], replace(case, inputs=inputs, outputs=outputs))


def samples(case, batch):
    sized = zip(case.inputs, batch.inputs, strict=True)
    (count,) = {array.shape[axis] for array, axis in sized if axis is not None}
    return count


def test_slices_of_the_batch_make_up_the_whole():
    seen = set()
    for case in cases("f8"):
        traits = case.traits
        batch = traits.batch
        if batch is None:
            continue
        n = samples(case, batch)
        if n < 2:
            continue
        seen.add(case.op)
        whole = compute(KERNELS[case.op], case)
        slices = [slice(0, n // 3 or 1), slice(n // 3 or 1, n)]
        attrs = dict(case.attrs)
        results = []
        for rows in slices:
            if case.op == "slice":
                stops = (rows.stop - rows.start, *attrs["stops"][1:])
                case.attrs = attrs | {"stops": stops}
            results.append(cut(case, batch, rows, attrs))
        for index, axis in enumerate(batch.outputs):
            if index in batch.gathered:  # tests/test_split.py merges them
                continue
            shares = [
                values[index] * ((rows.stop - rows.start) / n)
                if index in batch.averaged
                else values[index]
                for rows, values in zip(slices, results, strict=True)
            ]
            if traits.random:  # the others draw by their elements' positions
                close(shares[0], part(whole[index], axis, slices[0]))
            elif axis is None:
                close(sum(shares), whole[index], 1e-9)
            else:
                close(np.concatenate(shares, axis), whole[index])
    assert seen == OPERATIONS.keys() - UNCUT - {"conv", "reshape", "pad"}


@pytest.mark.parametrize("direction", Direction)
def test_slices_of_a_convolution_make_up_the_whole(direction):
    problem = conv_problem((5, 2, 6, 4), (3, 2, 3, 3), direction, padding=1, stride=2)
    first, second = problem.operands()[:2]
    made = problem.operands()[2]
    batch = traits_of("conv", (first, second), (made,), {"problem": problem}).batch
    rng = np.random.default_rng(0)
    arrays = [rng.random(spec.shape, np.float32) for spec in (first, second)]
    conv = get_backend("cpu").conv

    def result(n, operands, shape):
        out = np.zeros(shape, np.float32)
        one = problem.with_batch(n)
        conv.run(one, "IMPLICIT_GEMM", *map(np.ascontiguousarray, operands), out, None)
        return out

    (axis,) = batch.outputs
    whole = result(5, arrays, made.shape)
    parts = []
    for rows in (slice(0, 2), slice(2, 5)):
        n = rows.stop - rows.start
        operands = map(part, arrays, batch.inputs, (rows, rows))
        shape = made.shape if axis is None else (n, *made.shape[1:])
        parts.append(result(n, operands, shape))
    found = sum(parts) if axis is None else np.concatenate(parts)
    close(found, whole, 1e-5)


@pytest.mark.parametrize(
    ("op", "before", "after", "attrs", "axes"),
    [
        ("reshape", (4, 6), (4, 2, 3), {}, Batch((0,), (0,))),
        ("reshape", (4, 6), (24,), {}, None),
        ("pad", (4, 6), (4, 8), {"before": (0, 1), "after": (0, 1)}, Batch((0,), (0,))),
        ("pad", (4, 6), (5, 6), {"before": (1, 0), "after": (0, 0)}, None),
        ("slice", (4, 6), (3, 6), {"starts": (1, 0), "stops": (4, 6)}, None),
        ("relu", (), (), {}, None),
    ],
)
def test_what_can_be_cut_depends_on_the_operands(op, before, after, attrs, axes):
    specs = [TensorSpec("x", before)], [TensorSpec("y", after)]
    assert traits_of(op, *specs, attrs).batch == axes


def test_every_node_of_ours_carries_its_traits():
    graph = training_graph(mucudnn.models.get_model("lenet")(2))
    for node in graph.nodes:
        inputs = [graph.tensors[t] for t in node.inputs]
        outputs = [graph.tensors[t] for t in node.outputs]
        assert node.traits == traits_of(node.op, inputs, outputs, node.attrs)


def test_an_operation_of_ones_own_says_what_it_is():
    g = GraphBuilder()
    x = g.relu(g.input("x", (4,)))
    mine = NodeTraits(overwrites=(0,), temporaries=96)
    graph = g.build(g.append("mine", (x,), (4,), traits=mine))
    assert graph.nodes[-1].traits == mine
    assert in_place(graph).tensors["mine"].alias == x
    assert estimate(graph, "p100").workspaces == {"mine": 96}
    tensors = {name: TensorSpec(name, (2,)) for name in "xy"}
    node = Node("v", "view", ("x",), ("y",), traits=NodeTraits(view=True))
    with pytest.raises(ValueError, match=r"'v' is a view, but 'y' does not alias"):
        Graph(tensors, (node,), ("y",))
    with pytest.raises(ValueError, match=r"'x' has the data type 'e5m2'.*storage_by"):
        _ = TensorSpec("x", (3,), "e5m2").nbytes
    assert TensorSpec("x", (3,), "e5m2", storage_bytes=7).nbytes == 7


@examples(60)
@given(data=st.data())
def test_foreign_nodes_keep_the_rules(data):
    graph = data.draw(foreign(data.draw(training_graphs(updates=True))))
    profile = data.draw(profiles(graph))
    residency = data.draw(residencies(graph))
    request = StepRequest(graph, profile, convolutions="least")
    budget = request.rewritten(residency).least_peak()
    schedule = plan_residency(request.within(budget), residency).schedule
    verify(schedule, budget, granularity=512)
    final = schedule.graph
    copies = {origin(node.name) for node in final.nodes if "~" in node.name}
    assert all(graph.by_name[name].recomputable for name in copies)
    moves = {i.tensor for i in schedule.instructions if isinstance(i, SwapOut | SwapIn)}
    assert not moves & final.immovable
    there = {i.tensor for i in schedule.instructions if isinstance(i, Alloc | Free)}
    assert not there & {spec.name for spec in final.with_role(Role.BORROWED)}
    for name in final.inputs:
        assert final.tensors[name] == graph.tensors[name]


@examples(60)
@given(data=st.data())
def test_foreign_nodes_compute_the_same_values(data):
    plain = data.draw(training_graphs(updates=data.draw(st.booleans())))
    graph = data.draw(foreign(plain, sizes=False))
    residency = data.draw(residencies(graph))
    backend = get_backend("cpu")
    expected = execute(backend, graph, feeds(graph))
    again = in_place(Rematerializer(graph)(residency))
    found = execute(backend, again, feeds(again))
    for name in (*graph.outputs, *(s.name for s in graph.with_role(Role.PARAMETER))):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@examples(200)
@given(data=st.data())
def test_what_was_overwritten_is_not_computed_again(data):
    """Sums in place and state that changes in the forward pass."""
    graph = data.draw(graphs(most=16, phases=True))
    residency = {
        saved.name: data.draw(st.sampled_from(RECOMPUTED))
        for saved in saved_tensors(graph)
    }
    again = Rematerializer(graph)(residency)
    symbols = Symbols()
    reads, left = symbols.meaning(graph)
    new_reads, new_left = symbols.meaning(again)
    assert new_left == left
    assert {name: new_reads[name] for name in reads} == reads


def foreign_step():
    """A step with everything that other frameworks bring."""
    g = GraphBuilder()
    x = g.input("image", (4, 4, 8, 8))
    for _ in range(4):
        x = g.conv(x, 4, 3, padding=1)
        constant = g.append("fill", (), g.shape(x), value=0.5)
        x = g.max_pool(g.multiply(g.gelu(x), constant), 3, 1, 1)
    graph = training_graph(g.build(g.mean_squared_error(x, g.input("t", g.shape(x)))))
    tensors = dict(graph.tensors)
    tensors["image"] = replace(tensors["image"], role=Role.BORROWED)
    pools = [n for n in graph.nodes if n.op == "max_pool"]
    opaque = {pools[1].name, pools[2].name}
    nodes = tuple(
        replace(n, traits=OPAQUE) if n.name in opaque else n for n in graph.nodes
    )
    return replace(graph, tensors=tensors, nodes=nodes)


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_plans_foreign_nodes(policy):
    graph = foreign_step()
    profile = estimate(graph, "p100")
    request = StepRequest(graph, profile, policy=policy)
    least = minimum_budget(request)
    for budget in (least, 2 * least):
        plan = plan_step(request.within(budget))
        verify(plan.schedule, budget, granularity=512)
        assert "image" in plan.schedule.resident
        moved = {
            i.tensor
            for i in plan.schedule.instructions
            if isinstance(i, SwapOut | SwapIn)
        }
        assert not moved & plan.schedule.graph.immovable
    placed = place_step(request.within(2 * least))
    assert "image" not in placed.layout.offsets


def test_memory_of_the_caller_is_there_all_the_time():
    graph = foreign_step()
    live = live_ranges(graph)["image"]
    assert (live.first, live.last) == (0, len(graph.nodes))
    assert uses_of(graph)["image"].persistent
    assert "image" in graph.immovable


def test_a_view_in_the_backward_pass_follows_what_is_computed_again():
    """Its alias may be any tensor of the storage, here the one that was dropped."""
    tensors = {
        "x": TensorSpec("x", (4,), role=Role.INPUT),
        "y": TensorSpec("y", (4,)),
        "v": TensorSpec("v", (2, 2), alias="y"),
        "u": TensorSpec("u", (4, 1), alias="y"),
        "z": TensorSpec("z", (4,)),
    }
    view = NodeTraits(view=True)
    nodes = (
        Node("y", "scale", ("x",), ("y",)),
        Node("v", "view", ("y",), ("v",), phase=Phase.BACKWARD, traits=view),
        Node("u", "view", ("v",), ("u",), phase=Phase.BACKWARD, traits=view),
        Node("z", "scale", ("u",), ("z",), phase=Phase.BACKWARD),
    )
    graph = Rematerializer(Graph(tensors, nodes, ("z",)))({"y": Residency.RECOMPUTE})
    assert graph.storages["u"] == graph.storages["v"] == "y~1"
