"""The demonstration as one page: an act, its sentence, its picture."""

from collections.abc import Sequence

from mucudnn.report.charts import curve, timeline
from mucudnn.report.markup import Markup, tag
from mucudnn.report.memory_charts import memory_chart
from mucudnn.report.pages.memory import SHEETS
from mucudnn.report.pages.page import header, page
from mucudnn.studies.demo import LayerAct, StepAct

__all__ = ["demo_page"]


def demo_page(acts: Sequence[LayerAct | StepAct], machine: str) -> str:
    """The whole file, as text."""
    drawn = [_layer(act) if isinstance(act, LayerAct) else _step(act) for act in acts]
    return page(
        "What memory buys",
        SHEETS,
        header("What memory buys, and what can be had without it", machine, []),
        tag("main", drawn),
        tag("footer", "Measured here, just now; a busy machine changes the times."),
    )


def _layer(act: LayerAct) -> Markup:
    layer = act.comparison.layers[0]
    colours = {algo: i for i, algo in enumerate(act.comparison.algorithms)}
    pictures = (tag("figure", one(layer, colours)) for one in (curve, timeline))
    return _act(
        "A convolution in a limit", act.sentence, tag("div", pictures, class_="figures")
    )


def _step(act: StepAct) -> Markup:
    chart = memory_chart(act.plan, act.whole, act.budget)
    return _act(
        f"A training step in a budget: {act.name}",
        act.sentence,
        tag("div", chart, class_="wide"),
    )


def _act(name: str, sentence: str, picture: Markup) -> Markup:
    return tag("section", tag("h2", name), tag("p", sentence), picture, class_="panel")
