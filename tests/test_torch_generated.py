"""Programs put together by chance: planned steps give what eager mode gives."""

from hypothesis import given, note, strategies as st

from tests.examples import examples
from tests.torch_generated import Recipe, compared, recipe_of
from tests.torch_marks import STEPS_RUN

pytestmark = STEPS_RUN


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    return recipe_of(lambda options: draw(st.sampled_from(options)))


@examples(30)
@given(recipes())
def test_planned_steps_of_any_program_are_eager_modes_or_refused(recipe):
    report = compared(recipe)
    note(f"{report.plan_count()} plans, refused: {report.refusals}")
    assert not report.differences
