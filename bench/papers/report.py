"""The reproduced papers as plain tables."""

from collections.abc import Mapping
from typing import Any

from bench.table import render

_POLICIES = ("conv", "all")


def table(result: Mapping[str, Any]) -> str:
    """The result of `bench.papers.run` as text."""
    return "\n\n".join(
        [
            "Published figures (V: must agree within 0.1 %, or within one unit of the "
            "last digit printed; F: stands beside ours)\n" + figures_table(result),
            "SuperNeurons' accounting (MiB; parameters, workspace and input not "
            "counted)\n" + _superneurons(result),
            "vDNN's accounting (decimal GB; most / average / offloaded)\n"
            + _vdnn(result),
            "Largest batch in 12 GiB (MiB an image / batch by SuperNeurons' "
            "accounting and 12 bytes a parameter)\n" + _capacity(result),
            "Deepest ResNet in 12 GiB (blocks 6, 32, n, 6; 0: none)\n"
            + _depths(result),
        ]
    )


def figures_table(result: Mapping[str, Any]) -> str:
    """The published figures beside ours, and whether they agree."""
    header = ("paper", "figure", "unit", "paper's", "ours", "differs", "mark", "agrees")
    rows = [
        (
            one["paper"],
            one["what"],
            one["unit"],
            f"{one['published']:.7g}",
            f"{one['ours']:.3f}".rstrip("0").rstrip("."),
            f"{100 * one['difference']:+.3f} %",
            one["mark"],
            _verdict(one),
        )
        for one in result["figures"]
    ]
    return render(header, rows)


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
                f"{found['mib_an_image']:.1f} / {found['batch']}"
                for found in one["techniques"].values()
            ),
        )
        for one in result["capacity"]
    ]
    return render(("model", *techniques), rows)


def _depths(result: Mapping[str, Any]) -> str:
    rows = [tuple(one.values()) for one in result["depths"]]
    return render(("technique", "batch", "depth"), rows)
