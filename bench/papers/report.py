"""The reproduced papers as plain tables."""

from collections.abc import Mapping
from typing import Any

from bench.papers import tsplit
from bench.papers.published import RULES
from bench.table import render

_POLICIES = ("conv", "all")


def table(result: Mapping[str, Any]) -> str:
    """The result of `bench.papers.run` as text."""
    return "\n\n".join(
        [
            "Published figures (V: must agree within 0.1 %, or within one unit of the "
            "last digit printed; F: stands beside ours).\nOurs is by the paper's "
            "rules, or, marked ~, an estimate in which every byte counts. Planned: "
            "what our planner\ndoes in that memory, with room for what the paper "
            "leaves out: time over that of the same step unbounded, and its least "
            "budget\n" + figures_table(result),
            "SuperNeurons' accounting, ours (MiB; parameters, workspace and input not "
            "counted)\n" + _superneurons(result),
            "vDNN's accounting, ours (decimal GB; most / average / offloaded)\n"
            + _vdnn(result),
            "Largest batch in 12 GiB, ours (MiB an image / batch by SuperNeurons' "
            "accounting and 12 bytes a parameter;\nbehind |: every byte counted, for "
            "the K40c)\n" + _capacity(result),
            "Deepest ResNet in 12 GiB, ours (blocks 6, 32, n, 6; 0: none; planned: "
            "every byte counted)\n" + _depths(result),
            "Our planner beside the paper's own policy, every byte counted (MiB; time "
            "over that of the same step unbounded)\n" + planner_table(result),
            "Out of core, every byte counted (estimated; speed in core is that of the "
            "largest batch that fits unmoved)\n" + out_of_core_table(result),
            "Largest batch in slices that keeps 80 % of the speed of SuperNeurons' "
            "policy at its own largest batch\n(estimated; TSPLIT reports 3.1 times "
            "SuperNeurons' model scale)\n" + tsplit.table(result["tsplit"]),
        ]
    )


def figures_table(result: Mapping[str, Any]) -> str:
    """The published figures beside ours, and whether they agree."""
    header = ("paper", "figure", "unit", "paper's", "ours", "differs", "mark",
              "planned", "agrees")  # fmt: skip
    rows = [
        (
            one["paper"],
            one["what"],
            one["unit"],
            f"{one['published']:.7g}",
            ("" if one["counted"] == RULES else "~")
            + f"{one['ours']:.3f}".rstrip("0").rstrip("."),
            f"{100 * one['difference']:+.3f} %",
            one["mark"],
            _planned(one["planned"]),
            _verdict(one),
        )
        for one in result["figures"]
    ]
    return render(header, rows)


def _planned(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    least = f"least {row['least_mib']:.0f} MiB"
    return f"{times(row['slowdown'])} in {row['budget_mib']:.0f} MiB, {least}"


def _verdict(one: Mapping[str, Any]) -> str:
    if one["wrong"]:
        return "WRONG"
    if one["near"]:
        return "yes"
    return "to its last digit" if one["agrees"] else str(one["reason"])


def _superneurons(result: Mapping[str, Any]) -> str:
    header = (
        "model", "image", "batch", "tensors", "layers", "all", "liveness", "offload",
        "on demand", "speed", "memory", "cost", "cost+prefetch", "extra",
    )  # fmt: skip
    modes = ("speed", "memory", "cost_aware", "cost_aware_prefetch")
    rows = [
        (
            *(one[key] for key in ("model", "image", "batch", "tensors", "layers")),
            *(one[f"{key}_mib"] for key in ("baseline", "liveness")),
            *(one[f"offload_{key}_mib"] for key in ("prefetch", "on_demand")),
            *(one[mode]["peak_mib"] for mode in modes),
            "/".join(str(one[mode]["extra"]) for mode in modes[:3]),
        )
        for one in result["superneurons"]
    ]
    return render(header, rows)


def _vdnn(result: Mapping[str, Any]) -> str:
    header = ("network", "batch", "maps", "weights", "baseline", "conv", "all", "saved",
              "of features")  # fmt: skip
    rows = [
        (
            one["network"],
            one["batch"],
            *(one[f"{key}_gb"] for key in ("maps", "weights", "baseline")),
            *(" / ".join(f"{gb:.2f}" for gb in one[key].values()) for key in _POLICIES),
            f"{one['saving']:.0%}",
            f"{one['feature_saving']:.0%}",
        )
        for one in result["vdnn"]
    ]
    return render(header, rows)


def _capacity(result: Mapping[str, Any]) -> str:
    techniques = list(result["capacity"][0]["techniques"])
    rows = [
        (
            one["model"],
            *(
                f"{one['techniques'][name]['mib_an_image']:.1f} / "
                f"{one['techniques'][name]['batch']}"
                for name in techniques
            ),
            "|",
            one["planned"]["superneurons_batch"],
            one["planned"]["batch"],
            times(one["planned"]["slowdown"]),
        )
        for one in result["capacity"]
    ]
    ours = ("|", "superneurons", "planned", "time")
    return render(("model", *techniques, *ours), rows)


def _depths(result: Mapping[str, Any]) -> str:
    rows = [
        (
            one["technique"],
            one["batch"],
            f"{'at least ' if one['at_least'] else ''}{one['depth']}",
        )
        for one in result["depths"]
    ]
    return render(("technique", "batch", "depth"), rows)


def planner_table(result: Mapping[str, Any]) -> str:
    """A row for every case: ours, then what the paper's policy does there."""
    header = (
        *("paper", "network", "batch", "device", "memory", "MiB", "least", "unbounded"),
        *("planned", "moved out", "again", "theirs", ""),
    )
    rows = [
        (
            *(row[key] for key in ("paper", "network", "batch", "device", "at")),
            *(round(row[f"{key}_mib"]) for key in ("budget", "least", "unbounded")),
            *_outcome(row["planned"]),
            row["theirs"]["policy"],
            _theirs(row["theirs"]),
        )
        for row in result["planner"]
    ]
    return render(header, rows)


def out_of_core_table(result: Mapping[str, Any]) -> str:
    """A row for every device, policy and scheduler."""
    header = (
        *("device", "MiB", "least", "batch", "in core", "times", "policy"),
        *("scheduler", "time", "moved out", "again", "images/s", "of in core"),
    )
    rows = [
        (
            row["device"],
            *(round(row[f"{key}_mib"]) for key in ("budget", "least")),
            row["batch"],
            row["in_core_batch"],
            row["times_in_core"],
            one["policy"],
            _scheduler(one),
            *_outcome(one),
            round(one["images_per_s"]),
            f"{one['speed']:.0%}",
        )
        for row in result["out_of_core"]
        for one in row["techniques"]
    ]
    return render(header, rows)


def times(slowdown: float | None) -> str:
    """A step's time over the unbounded one's."""
    return "does not fit" if slowdown is None else f"{slowdown:.2f}x"


def _scheduler(one: Mapping[str, Any]) -> str:
    """The one asked for, or of any the one that was chosen."""
    asked, chosen = str(one["asked"]), one["scheduler"]
    return asked if chosen in (None, asked) else f"{asked}: {chosen}"


def _outcome(one: Mapping[str, Any]) -> tuple[object, ...]:
    moved = one["moved_out_mib"]
    return (
        times(one["slowdown"]),
        None if moved is None else round(moved),
        one["recomputed_nodes"],
    )


def _theirs(one: Mapping[str, Any]) -> str:
    return times(one["slowdown"]) if one["fits"] else f"needs {one['peak_mib']:.0f}"
