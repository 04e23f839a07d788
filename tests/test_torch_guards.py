"""A planned step never gives what Python no longer says: about 640 small programs."""

import re

import pytest

torch = pytest.importorskip("torch")

from tests import (  # noqa: E402
    torch_programs_attributes,
    torch_programs_counting,
    torch_programs_functions,
    torch_programs_hooks,
    torch_programs_lookups,
    torch_programs_tensors,
    torch_programs_training,
)
from tests.torch_marks import STEPS_RUN  # noqa: E402
from tests.torch_programs import Program, built, compare, new_step  # noqa: E402
from tests.torch_steps import least_bytes  # noqa: E402

pytestmark = [*STEPS_RUN, pytest.mark.usefixtures("free_copies")]

MODULES = (
    torch_programs_attributes,
    torch_programs_functions,
    torch_programs_counting,
    torch_programs_hooks,
    torch_programs_lookups,
    torch_programs_tensors,
    torch_programs_training,
)
PROGRAMS: dict[str, Program] = {
    name: program for module in MODULES for name, program in module.PROGRAMS.items()
}
COUNTING = [name for name, program in PROGRAMS.items() if program.changes_in_step]
SAID = {
    "iterator_in_an_attribute": "Reading.numbers is a builtins.range_iterator",
    "buffer_made_by_the_first_step": "'mask'",
    "stored_weight_by_another_name": "'a' of a Reading",
    "stored_weight_in_a_buffer": "'b'",
    "stored_none": "'layer.bias'",
}
SOME_COUNTING = [n for i, n in enumerate(COUNTING) if i % 4 == 0 or n in SAID]


@pytest.mark.parametrize("name", PROGRAMS)
def test_planned_steps_are_eager_modes_or_refused(name):
    report = compare(PROGRAMS[name])
    assert not report.differences
    if PROGRAMS[name].keeps_plan:
        assert report.kept_its_plan()
    if PROGRAMS[name].is_planned:
        assert report.was_planned()


@pytest.mark.parametrize("fallback", ["refuse", "eager"])
@pytest.mark.parametrize("name", SOME_COUNTING)
def test_a_step_that_changes_what_it_reads_is_refused_unless_told(name, fallback):
    report = compare(PROGRAMS[name], budget="1GiB", fallback=fallback)
    assert not report.differences
    assert fallback == "refuse" or not report.refusals
    said = " ".join(map(str, (*report.refusals, *report.warned)))
    assert SAID.get(name, "") in said


def test_a_counter_within_a_budget_is_captured_at_every_step():
    program = PROGRAMS["module_counter"]
    with built(program, 0) as training:
        step = new_step(training, {"budget": 1024})
        least = least_bytes(step, *training.batches[0])
    report = compare(program, budget=least)
    assert not report.differences + report.refusals
    assert re.search(r"captured anew.*Reading\.count", " ".join(report.warned))


def test_every_program_has_a_name_of_its_own():
    assert len(PROGRAMS) == sum(len(module.PROGRAMS) for module in MODULES)
