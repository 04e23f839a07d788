"""Page of the demonstration: an act, its sentence, its chart."""

from collections.abc import Sequence

from mucudnn.report.charts import curve, timeline
from mucudnn.report.markup import Markup, tag
from mucudnn.report.memory_charts import memory_chart
from mucudnn.report.pages.memory import SHEETS
from mucudnn.report.pages.page import header, page
from mucudnn.studies.demo import LayerAct, StepAct

__all__ = ["demo_page"]


def demo_page(acts: Sequence[LayerAct | StepAct], machine: str) -> str:
    """Return the file as text."""
    return page(
        "What memory buys",
        SHEETS,
        header("What memory buys, and what can be had without it", machine, []),
        tag("main", map(_section, acts)),
        tag("footer", "Measured here, just now; a busy machine changes the times."),
    )


def _section(act: LayerAct | StepAct) -> Markup:
    if isinstance(act, LayerAct):
        layer, name = act.comparison.layers[0], "A convolution in a limit"
        colours = {algo: i for i, algo in enumerate(act.comparison.algorithms)}
        figures = (tag("figure", one(layer, colours)) for one in (curve, timeline))
        picture = tag("div", figures, class_="figures")
    else:
        name = f"A training step in a budget: {act.name}"
        chart = memory_chart(act.plan, act.whole, act.budget)
        picture = tag("div", chart, class_="wide")
    sentence = tag("p", act.sentence)
    return tag("section", tag("h2", name), sentence, picture, class_="panel")
