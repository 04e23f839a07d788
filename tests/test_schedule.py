from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import ScheduleError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT, Graph, Node
from mucudnn.ir.schedule import Alloc, Compute, Free, Schedule, SwapIn, SwapOut, Wait
from mucudnn.ir.tensor import Role, TensorSpec
from tests.graphs import graphs, scratch
from tests.plain_schedule import keep_all, peak_bytes
from tests.schedule_oracle import verify


@given(st.data())
def test_keep_all_is_accepted_with_the_live_peak(data):
    graph = data.draw(graphs())
    workspaces = data.draw(scratch(graph))
    schedule = keep_all(graph, workspaces)
    assert verify(schedule) == schedule.peak_bytes == peak_bytes(graph, workspaces)
    moved = {i.tensor for i in schedule.instructions if not isinstance(i, Compute)}
    roles = {graph.tensors[name].role for name in moved}
    assert not roles & set(PERSISTENT)
    assert all(graph.storages[name] == name for name in moved)


@given(st.data())
def test_no_instruction_can_be_left_out_or_doubled(data):
    schedule = keep_all(data.draw(graphs()))
    given_ = schedule.instructions
    at = data.draw(st.integers(0, len(given_) - 1))
    without = (*given_[:at], *given_[at + 1 :])
    with pytest.raises(ScheduleError):
        verify(replace(schedule, instructions=without))
    doubled = (*given_[: at + 1], *given_[at:])
    with pytest.raises(ScheduleError):
        verify(replace(schedule, instructions=doubled))


@given(st.data())
def test_the_peak_must_be_right_and_within_the_budget(data):
    schedule = keep_all(data.draw(graphs()))
    peak = schedule.peak_bytes
    assert verify(schedule, peak) == peak
    with pytest.raises(ScheduleError, match="budget"):
        verify(schedule, peak - 1)
    with pytest.raises(ScheduleError, match=f"states a peak of {peak + 4}"):
        verify(replace(schedule, peak_bytes=peak + 4))


def two_steps():
    """x -> a -> b -> c, and c also reads a."""
    b = GraphBuilder()
    x = b.input("x", (4,))
    a = b.scale(x, 2.0)
    return b.build(b.add(b.scale(a, 3.0), a))


A, B, C = "scale", "scale.1", "add"
START = (Alloc("x"), Alloc(A), Compute(A), Free("x"))
END = (Alloc(C), Compute(C), Free(A), Free(B))
MIDDLE = (Alloc(B), Compute(B))


def run(*instructions, peak=48):
    return verify(Schedule(two_steps(), instructions, {}, peak))


def test_a_swap_makes_room_and_brings_back():
    away = (SwapOut(A), Wait(A), Free(A))
    back = (Alloc(A), SwapIn(A), Wait(A))
    assert run(*START, *MIDDLE, *away, *back, *END) == 48


@pytest.mark.parametrize(
    ("instructions", "problem"),
    [
        ((*START, SwapOut(A), Free(A), *MIDDLE, *END), "being copied"),
        ((*START, *MIDDLE, SwapOut(A), SwapOut(A), *END), "being copied"),
        ((*START, *MIDDLE, SwapOut(A), Wait(A), SwapIn(A), *END), "still copied"),
        ((*START, *MIDDLE, SwapIn(A), Wait(A), *END), "not on the host"),
        ((*START, *MIDDLE, SwapOut(C), *END), "nothing to save"),
        ((*START, SwapOut(A), Wait(A), Free(A), SwapIn(A)), "no room"),
        ((*START, *MIDDLE, Free(A), Alloc(A), *END), "'scale', which is not there"),
        ((*START, *MIDDLE, Free("y"), *END), "no memory of its own"),
        ((*START, *MIDDLE, Compute("y"), *END), "no such node"),
        ((*START, *MIDDLE, Compute(B), *END), "has run already"),
        ((*START, Compute(B), *END), "'scale.1' has no memory"),
        ((*START, *MIDDLE, *END[:-1]), "never freed"),
        ((*START, *MIDDLE, *END, Free(C)), "'add' is lost"),
        ((*START, *MIDDLE, Free(A), Free(B)), r"\['add'\] never run"),
        ((*START, *MIDDLE, *END, SwapOut(C)), "nothing waits"),
    ],
)
def test_every_rule_is_checked(instructions, problem):
    with pytest.raises(ScheduleError, match=problem):
        run(*instructions)


def test_what_was_overwritten_cannot_be_read():
    tensors = {
        "x": TensorSpec("x", (1,), role=Role.INPUT),
        "a": TensorSpec("a", (1,)),
        "b": TensorSpec("b", (1,), alias="a"),
        "c": TensorSpec("c", (1,)),
    }
    nodes = (
        Node("make", "scale", ("x",), ("a",)),
        Node("overwrite", "relu", ("a",), ("b",)),
        Node("read", "scale", ("a",), ("c",)),
    )
    with pytest.raises(ScheduleError, match="it reads 'a', which is not there"):
        verify(keep_all(Graph(tensors, nodes, ("c",))))
    assert verify(keep_all(Graph(tensors, nodes[:2], ("b",)))) == 8


def test_a_copy_on_the_host_keeps_the_value_it_had():
    tensors = {
        "x": TensorSpec("x", (1,), role=Role.INPUT),
        "a": TensorSpec("a", (1,)),
        "b": TensorSpec("b", (1,), alias="a"),
    }
    nodes = (
        Node("make", "scale", ("x",), ("a",)),
        Node("overwrite", "relu", ("a",), ("b",)),
    )
    graph = Graph(tensors, nodes, ("b",))
    made = (Alloc("x"), Alloc("a"), Compute("make"), Free("x"))
    saved = (SwapOut("a"), Wait("a"), Compute("overwrite"))
    back = (SwapIn("a"), Wait("a"))
    assert verify(Schedule(graph, (*made, *saved), {}, 8)) == 8
    with pytest.raises(ScheduleError, match="'b' is lost"):
        verify(Schedule(graph, (*made, *saved, *back), {}, 8))
    early = (*made, SwapOut("a"), Compute("overwrite"), Wait("a"))
    with pytest.raises(ScheduleError, match="being copied"):
        verify(Schedule(graph, early, {}, 8))


def test_persistent_tensors_never_move():
    b = GraphBuilder()
    b.bias(b.input("x", (2, 3)))
    graph = b.build("bias.1")
    schedule = keep_all(graph)
    moved = (Alloc("bias"), *schedule.instructions)
    with pytest.raises(ScheduleError, match="persistent"):
        verify(replace(schedule, instructions=moved))
