"""`python -m bench.torch.picture torch.json DIR`: what bytes cost, in pictures."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.memory_picture import CHART, panels
from mucudnn.report.svg import Frame, Markup, Scale, bytes_axis, drawing, marker, tag

_OURS = "ours"
_WAYS = (_OURS, "activation_memory_budget", "checkpoint_sequential", "save_on_cpu")
_SHOWN = {"resnet50": "ResNet-50", "gpt": "GPT", "unet": "U-Net"}
_MIB = 1 << 20


def main() -> int:
    """Draw the results of `python -m bench torch`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    networks = json.loads(options.results.read_text())["networks"]
    path = options.folder / "torch.svg"
    path.write_text(picture(networks))
    print(path)
    return 0


def picture(networks: Sequence[Mapping[str, Any]]) -> str:
    """Draw the time of forward and backward pass against peak memory, both measured."""
    title = "Time over eager mode's against peak memory beyond parameters, measured"
    named = [
        (_name(network), [{**row, "cost": row["measured"]} for row in network["rows"]])
        for network in networks
        if network["model"] in _SHOWN
    ]
    return charts(title, named, _WAYS, "time over eager mode's")


def charts(
    title: str,
    networks: Sequence[tuple[str, Sequence[Mapping[str, Any]]]],
    ways: Sequence[str],
    times: str,
) -> str:
    """Draw one chart a network, with one curve a way.

    Args:
        title: What they show.
        networks: Names and rows, which have a `way`, a `setting`, `peak_bytes` and a
            `cost`.
        ways: The ways that are drawn.
        times: What the cost is.
    """
    found = [(name, _chart(name, rows, ways, times)) for name, rows in networks]
    return panels(title, found, ways, _OURS)


def _name(network: Mapping[str, Any]) -> str:
    shape = "×".join(map(str, network["batch"][0]))
    return f"{_SHOWN[network['model']]}, {shape}"


def _chart(
    name: str, rows: Sequence[Mapping[str, Any]], ways: Sequence[str], times: str
) -> Markup:
    rows = [row for row in rows if row["way"] in ways]
    width, height = CHART
    frame = Frame(56.0, width - 14, 26.0, height - 44)
    most = max(row["peak_bytes"] for row in rows)
    x, unit, size = bytes_axis(most, frame.left, frame.right, most_ticks=6)
    y = _times([row["cost"] for row in rows], frame)
    by_way = [(way, [row for row in rows if row["way"] == way]) for way in ways]
    curves = [_line(i, *of, x, y) for i, of in enumerate(by_way)]
    return drawing(
        width,
        height,
        f"Time against peak memory: {name}",
        frame.vertical(y, times, 1.0),
        frame.horizontal(x, f"peak memory, {unit}", size),
        reversed(curves),
    )


def _times(costs: Sequence[float], frame: Frame) -> Scale:
    """From a little less than the least or than once, in tenths or in more."""
    most = max(costs)
    step = next(s for s in (0.1, 0.2, 0.5, 1.0, 5.0, 20.0) if (most - 1) / s < 6)
    first = min(0, math.floor((min(costs) - 1) / step))
    count = int((most - 1) / step) + 1
    ticks = tuple(round(1 + i * step, 1) for i in range(first, count + 1))
    return Scale(ticks[0] - step / 4, ticks[-1], frame.bottom, frame.top, ticks)


def _line(
    index: int, way: str, rows: Sequence[Mapping[str, Any]], x: Scale, y: Scale
) -> Iterator[Markup]:
    ours = way == _OURS
    points = [(row["peak_bytes"], row["cost"], row["setting"]) for row in rows]
    if ours:  # theirs in the order of their settings: some need more for a lower one
        points.sort()
    line = "L".join(f"{x(nbytes):.1f} {y(cost):.1f}" for nbytes, cost, _ in points)
    if len(points) > 1:
        strong = " strong" if ours else ""
        yield tag("path", class_=f"speed a{index}{strong}", d=f"M{line}")
    for nbytes, cost, setting in points:
        title = f"{way} {setting}: {nbytes / _MIB:.1f} MiB, {cost:.3f}"
        yield marker(index, x(nbytes), y(cost), title=title, filled=ours)


if __name__ == "__main__":
    sys.exit(main())
