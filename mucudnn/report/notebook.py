"""Plans and studies as HTML for notebooks, and the page of the demonstration.

A notebook shows many of them on one page: their style rules apply within their own
piece only, and no element has an id that another piece could have. They bring their own
background, light or dark as the reader's system.
"""

import re
from collections.abc import Iterable, Sequence
from functools import singledispatch

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.schedule import SwapOut
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.planning.plan_step import DescribedStep
from mucudnn.passes.scheduling.problem import origin
from mucudnn.passes.scheduling.step_plan import CountedPlan, StepPlan
from mucudnn.report.comparison import comparison_body, curve, plan_bar, timeline
from mucudnn.report.fleet import fleet_body, fleet_facts, fleet_heading
from mucudnn.report.memory import (
    budget_text,
    heading,
    memory_body,
    memory_report,
    queues_of,
)
from mucudnn.report.memory_charts import KINDS, lanes_chart, memory_chart, stack_chart
from mucudnn.report.page import SHEETS, header, legend, page, rendered, styles, table
from mucudnn.report.survey import survey_tables
from mucudnn.report.svg import Child, Markup, marker, tag
from mucudnn.report.text import (
    DIRECTIONS,
    Table,
    bytes_text,
    ms_text,
    plan_text,
    problem_text,
    runs,
)
from mucudnn.studies.algorithms import AlgorithmSurvey
from mucudnn.studies.convolutions import Comparison
from mucudnn.studies.demo import LayerAct, StepAct
from mucudnn.studies.fleet import FleetStudy
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import MemoryStudy

_CLASS = "mucudnn"
_SHOWN_POLICIES = ("keep_all", "planned")

_NAMED = 6
"""Maximum number of tensors and nodes that are listed; more are counted."""

_SELECTORS = re.compile(r"(^|[{}])\s*([^@{}\s][^{}]*?)\s*\{")


@singledispatch
def draw(value: object) -> str:
    """Return a value as HTML for a notebook, by the function registered for its type.

    Raises:
        TypeError: There is no drawing of such values.
    """
    raise TypeError(f"there is no drawing of {type(value).__name__}")


@draw.register
def _conv_plan(plan: ConvPlan) -> str:
    """Return micro-batches as a bar, and times of each run of equal ones."""
    algorithms = dict.fromkeys(step.algo for step in plan.steps)
    colours = {algo: i for i, algo in enumerate(algorithms)}
    times = {(step.algo, step.batch): step for step in plan.steps}
    rows = tuple(
        (algo, str(batch), str(count), ms_text(one.time_ms), bytes_text(one.workspace))
        for algo, batch, count in runs(plan)
        for one in (times[algo, batch],)
    )
    columns = ("algorithm", ">micro-batch", ">times", ">ms each", ">workspace")
    limit = plan.workspace_limit
    facts = f"{DIRECTIONS[plan.problem.direction]}, {problem_text(plan.problem)}"
    if limit is not None:
        facts += f"; planned within {bytes_text(limit)} of workspace"
    return _piece(
        ("style.css",),
        plan_text(plan),
        facts,
        plan_bar(plan, colours),
        legend(((marker(i, 6, 6), algo) for algo, i in colours.items()), "Algorithms"),
        table(Table("", columns, rows)),
    )


@draw.register
def _step_plan(
    plan: StepPlan, placed: PlacedStep | None = None, counted: CountedPlan | None = None
) -> str:
    """Return memory over the step, its peak, its arena, and the predicted slowdown."""
    prediction = plan.prediction
    node_ms, unbounded_ms = prediction.profile.node_ms, plan.unbounded_ms
    instructions = plan.schedule.instructions
    # Views are made again as well, but take no time.
    recomputed = [
        node.name
        for node in plan.schedule.graph.nodes
        if "~" in node.name and node_ms[node.name] > 0
    ]
    slowdown = prediction.step_ms / unbounded_ms if unbounded_ms else None
    facts = f"policy {plan.policy}, scheduler {plan.scheduler}"
    budget = plan.budget
    if counted is not None:
        budget, slowdown = counted.budget, counted.slowdown
        facts = "; ".join(counted.remarks)
    if budget < float("inf") and not facts.startswith("budget"):
        facts += f"{facts and ', '}budget {bytes_text(int(budget))}"
    content = rendered(
        "step",
        plan=plan,
        placed=placed,
        counted=counted,
        slowdown=slowdown,
        offloaded=[i.tensor for i in instructions if isinstance(i, SwapOut)],
        recomputed=[origin(name) for name in recomputed],
        names=_names,
        chart=stack_chart(plan),
        kinds=KINDS,
        lanes=lanes_chart(plan),
        queues=queues_of,
    )
    return _piece(SHEETS, "A training step", facts, content)


@draw.register
def _counted_plan(counted: CountedPlan) -> str:
    """Return a plan in the bytes that its user counts."""
    return _step_plan(counted.plan, counted=counted)


@draw.register
def _placed_step(placed: PlacedStep) -> str:
    """Return the step's plan with its arena."""
    return _step_plan(placed.plan, placed)


@draw.register
def _memory_study(study: MemoryStudy) -> str:
    """Return the report's cards, charts and table of techniques."""
    facts = f"{heading(study)}; budget {budget_text(study)}"
    return _piece(SHEETS, "Memory of a training step", facts, memory_body(study))


@draw.register
def _fleet_study(study: FleetStudy) -> str:
    """Return the report's cards, waiting chart and tables."""
    return _piece(SHEETS, fleet_heading(study), fleet_facts(study), fleet_body(study))


@draw.register(tuple)
def _described_step(asked: tuple[DescribedStep, int], *, whole: bool = False) -> str:
    """Return another framework's step within a budget, compared with keeping all."""
    step, budget = asked
    study = study_memory(step, policies=_SHOWN_POLICIES, budget=budget, curve=True)
    return memory_report(study) if whole else _memory_study(study)


@draw.register
def _comparison(found: Comparison) -> str:
    """Return the report's cards, table of speed-ups and layers."""
    facts = f"{found.backend} backend, {found.fingerprint}; numerics: {found.numerics}"
    body = comparison_body(found, linked=False)
    return _piece(("style.css",), "Planned against undivided", facts, body)


@draw.register
def _algorithm_survey(survey: AlgorithmSurvey) -> str:
    """Return how far each layer's first choice reaches, limit by limit."""
    _, reach = survey_tables(survey)
    return _piece(
        SHEETS,
        "Algorithms within a limit",
        reach.title,
        table(reach),
        tag("ul", (tag("li", note) for note in reach.notes), class_="notes"),
    )


def _names(names: Iterable[str], none: str) -> str:
    """Return distinct names, as many as fit in a card."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - _NAMED
    shown = ", ".join(distinct[:_NAMED]) or none
    return f"{shown} and {more} more" if more > 0 else shown


def _piece(sheets: Sequence[str], title: str, facts: str, *content: Child) -> str:
    style = scoped(styles(*sheets)) + styles("notebook.css")
    return tag(
        "div",
        tag("style", Markup(style)),
        tag("h2", title),
        tag("p", facts, class_="facts"),
        content,
        class_=_CLASS,
    )


def scoped(sheet: str) -> str:
    """Restrict the rules of a style sheet to a piece."""
    return _SELECTORS.sub(_within, sheet)


def _within(rule: re.Match[str]) -> str:
    before, selectors = rule.groups()
    inner = (
        f".{_CLASS}" if one in (":root", "body") else f".{_CLASS} {one}"
        for one in map(str.strip, selectors.split(","))
    )
    return f"{before}\n{', '.join(inner)} {{"


def demo_page(acts: Sequence[LayerAct | StepAct], machine: str) -> str:
    """Return the file as text."""
    return page(
        "mucudnn demonstration",
        SHEETS,
        header("Fast convolutions and training steps in less memory", machine, []),
        tag("main", map(_section, acts)),
        tag(
            "footer",
            "Measured on this machine just now; other programs affect the times.",
        ),
    )


def _section(act: LayerAct | StepAct) -> Markup:
    if isinstance(act, LayerAct):
        layer, name = act.comparison.layers[0], "A convolution within a workspace limit"
        colours = {algo: i for i, algo in enumerate(act.comparison.algorithms)}
        figures = (tag("figure", one(layer, colours)) for one in (curve, timeline))
        picture = tag("div", figures, class_="figures")
    else:
        name = f"A training step within a budget: {act.name}"
        chart = memory_chart(act.plan, act.whole, act.budget)
        picture = tag("div", chart, class_="wide")
    sentence = tag("p", act.sentence)
    return tag("section", tag("h2", name), sentence, picture, class_="panel")
