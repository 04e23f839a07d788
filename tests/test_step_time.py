"""The time of a step from its intervals, against its simulated program."""

import math
from dataclasses import replace

from hypothesis import given, strategies as st

from mucudnn.passes.planning.request import StepRequest, schedule_residency
from mucudnn.passes.scheduling import SCHEDULERS
from tests.examples import examples
from tests.random_graphs import profiles, residencies, training_graphs


@st.composite
def drafts(draw):
    """Any residencies of any step, in a budget between the least and all it wants."""
    graph = draw(training_graphs(updates=draw(st.booleans())))
    residency = draw(residencies(graph))
    free = StepRequest(
        graph,
        replace(
            draw(profiles(graph)),
            copy_share=draw(st.sampled_from([0, 0.3])),
            copy_overhead_ms=draw(st.sampled_from([0, 0.2])),
        ),
        scheduler=draw(st.sampled_from(sorted(SCHEDULERS.table))),
    )
    least = free.rewritten(residency).least_peak()
    budget = least + draw(st.sampled_from([0, 1024, 8192, 65536]))
    return schedule_residency(free.within(budget), residency)


@examples(120)
@given(found=drafts())
def test_it_is_what_the_simulated_program_takes_to_the_last_bit(found):
    assert found.step_ms() == found.plan().prediction.step_ms


@examples(150)
@given(found=drafts(), share=st.floats(0, 1.5))
def test_what_is_not_faster_is_given_up_and_what_is_faster_never(found, share):
    whole = found.step_ms()
    for below in (share * whole, whole, math.nextafter(whole, math.inf)):
        assert found.step_ms(below) == (whole if whole < below else math.inf)
