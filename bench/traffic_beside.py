"""Our steps beside PyTorch's eager ones of the same networks, where it is installed."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from bench.table import render
from bench.traffic_counts import DEVICE
from mucudnn.models import get_model

__all__ = ["beside_eager", "eager_tables"]

_GB = 1e9


def beside_eager(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """PyTorch's eager step beside each of ours; none without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return []
    from bench.traffic_eager import NETWORKS, eager_traffic

    rows = []
    for step in steps:
        model, precision = step["model"], step["precision"]
        if model not in NETWORKS:
            continue
        graph = get_model(model)(step["batch"])
        theirs = eager_traffic(
            model,
            graph.tensors["image"].shape,
            graph.tensors["label"].shape,
            None if precision == "float32" else precision,
            step["layout"],
        )
        same = ("model", "batch", "precision", "layout")
        rows.append(
            {
                **{word: step[word] for word in same},
                "ours": {word: step[word] for word in ("launches", "bytes", "ms")},
                "torch": {
                    "launches": theirs.launches,
                    "bytes": theirs.nbytes,
                    "ms": theirs.ms,
                },
                "flops": theirs.flops,
            }
        )
    return rows


def eager_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ours beside PyTorch's, if that was counted."""
    if not rows:
        return []
    header: tuple[str, ...] = ("model", "precision", "layout", "launches", "torch's")
    header += ("GB", "torch's", "ratio")
    header += (f"ms on an {DEVICE.upper()}, estimated", "torch's", "ratio")
    lines = []
    for row in rows:
        ours, theirs = row["ours"], row["torch"]
        line = [f"{row['model']} N={row['batch']}", row["precision"], row["layout"]]
        line += [ours["launches"], theirs["launches"]]
        for word, scale in (("bytes", _GB), ("ms", 1.0)):
            line += [
                ours[word] / scale,
                theirs[word] / scale,
                ours[word] / theirs[word],
            ]
        lines.append(line)
    return [f"beside PyTorch's eager step\n{render(header, lines)}"]
