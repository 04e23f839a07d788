"""Training within a budget beside what PyTorch has for it, network by network.

`bench.torch.compare` says what is measured; `table` sets ours beside each of theirs, in
the bytes that theirs really had in use.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.table import render

NETWORKS = ("resnet18", "resnet50", "gpt", "mobilenet_v3_small", "unet")

_MIB = 1 << 20
_SAME = 1.005
"""Costs that are no more different are the same."""


def run(names: Sequence[str] = NETWORKS) -> dict[str, Any]:
    """Measure networks, one after another. Ready for JSON."""
    import torch

    from bench.torch.compare import compare

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        networks = [compare(name, _case(name)) for name in names]
    finally:
        torch.set_num_threads(before)
    return {
        "threads": 1,
        "networks": networks,
        "failures": [text for one in networks for text in _failures(one)],
    }


def table(result: Mapping[str, Any]) -> str:
    """Theirs, and ours within the bytes that theirs have in use."""
    return "\n\n".join(map(_network, result["networks"]))


def beside(network: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Each of theirs, and ours in as much memory; ours in more if it needs more."""
    ours = [row for row in network["rows"] if row["budget_bytes"] is not None]
    least = min(row["budget_bytes"] for row in ours)
    by_budget = {row["budget_bytes"]: row for row in ours}
    for row in network["rows"]:
        if row["way"] != "ours":
            yield row, by_budget[max(least, row["peak_bytes"])]


def _case(name: str) -> Any:
    import torch

    from bench.torch import zoo

    makes: Mapping[str, Callable[[], Any]] = {
        "resnet18": lambda: zoo.classifier("resnet18", 16, 64),
        "resnet50": lambda: zoo.classifier("resnet50", 8, 112),
        "gpt": lambda: zoo.gpt(8, zoo.GPTConfig(dropout=0.0)),
        "mobilenet_v3_small": lambda: zoo.classifier("mobilenet_v3_small", 16, 96),
        "unet": lambda: zoo.unet(8, 64, 16),
    }
    torch.manual_seed(0)
    return makes[name]()


def _failures(network: Mapping[str, Any]) -> Iterator[str]:
    """Promises of ours that were not kept."""
    for row in network["rows"]:
        if row["way"] == "ours":
            what = f"{network['model']}, ours with {row['setting']}"
            same = row["same_gradients"] and row["same_buffers"]
            yield from unkept(what, row, same, "what eager mode computes")


def unkept(what: str, row: Mapping[str, Any], same: bool, wanted: str) -> Iterator[str]:
    """Yield which promises a planned row did not keep.

    Args:
        what: The row in words.
        row: With its real and its planned peak.
        same: Whether its results are those of `wanted`.
        wanted: What its results should be, in words.
    """
    if not same:
        yield f"{what}: not {wanted}"
    if row["peak_bytes"] > row["planned_bytes"]:
        yield f"{what}: {row['peak_bytes']} bytes, {row['planned_bytes']} planned"


def _network(network: Mapping[str, Any]) -> str:
    header = (
        *("way", "setting", "MiB", "cost", "measured", "bits", "ours, MiB"),
        *("cost", "measured", ""),
    )
    rows = []
    missed = []
    for theirs, ours in beside(network):
        more = ours["peak_bytes"] > theirs["peak_bytes"]
        dearer = ours["cost"] > _SAME * theirs["cost"]
        verdict = "does not fit" if more else "costs more" if dearer else ""
        if verdict:
            missed.append(f"{theirs['way']} {theirs['setting']}")
        rows.append((*_cells(theirs), *_cells(ours)[2:5], verdict))
    rows += [
        (*_cells(row), None, None, None, "")
        for row in network["rows"]
        if row["way"] == "ours"
    ]
    shapes = " ".join("x".join(map(str, shape)) for shape in network["batch"])
    return (
        f"{network['model']}, {shapes}: beyond parameters and buffers; eager mode "
        f"{network['eager_ms']:.0f} ms, one thread, load {network['load'][0]:.1f} to "
        f"{network['load'][1]:.1f}\n{render(header, rows)}\n"
        f"ours is behind at: {', '.join(missed) or 'none'}"
    )


def _cells(row: Mapping[str, Any]) -> tuple[Any, ...]:
    bits = (row["same_gradients"], row["same_buffers"])
    words = {
        (True, True): "same",
        (True, False): "buffers differ",
        (False, True): "gradients differ",
        (False, False): "both differ",
    }
    setting = row["setting"]
    if setting.isdigit() and row["way"] == "ours":
        setting = f"{int(setting) / _MIB:.1f} MiB"
    return (
        row["way"],
        setting,
        row["peak_bytes"] / _MIB,
        f"{row['cost']:.3f}",
        f"{row['measured']:.2f}",
        words[bits],
    )
