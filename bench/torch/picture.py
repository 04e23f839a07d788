"""`python -m bench.torch.picture torch.json DIR`: draw measured time against memory."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.memory_picture import CHART, panels
from mucudnn.report.svg import Frame, Markup, Scale, bytes_axis, drawing, marker, tag

__all__ = ["picture"]

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
    shown = [n for n in networks if n["model"] in _SHOWN]
    return panels(title, [(_name(n), _chart(n)) for n in shown], _WAYS, _OURS)


def _name(network: Mapping[str, Any]) -> str:
    shape = "×".join(map(str, network["batch"][0]))
    return f"{_SHOWN[network['model']]}, {shape}"


def _chart(network: Mapping[str, Any]) -> Markup:
    rows = [row for row in network["rows"] if row["way"] in _WAYS]
    width, height = CHART
    frame = Frame(56.0, width - 14, 26.0, height - 44)
    most = max(row["peak_bytes"] for row in rows)
    x, unit, size = bytes_axis(most, frame.left, frame.right, most_ticks=6)
    y = _times([row["measured"] for row in rows], frame)
    by_way = [[row for row in rows if row["way"] == way] for way in _WAYS]
    return drawing(
        width,
        height,
        f"Time against peak memory: {_name(network)}",
        frame.vertical(y, "time over eager mode's", 1.0),
        frame.horizontal(x, f"peak memory beyond parameters, {unit}", size),
        (_line(i, by_way[i], x, y) for i in reversed(range(len(_WAYS)))),
    )


def _times(times: Sequence[float], frame: Frame) -> Scale:
    """Return a scale from a little less than eager mode's time."""
    most = max(times) - 1
    step = next(s for s in (0.1, 0.2, 0.5, 1.0, 5.0) if most / s < 6)
    count = int(most / step) + 1
    ticks = tuple(round(1 + i * step, 1) for i in range(count + 1))
    least = min(1 - step / 4, *times)
    return Scale(least, ticks[-1], frame.bottom, frame.top, ticks)


def _line(
    index: int, rows: Sequence[Mapping[str, Any]], x: Scale, y: Scale
) -> Iterator[Markup]:
    ours = _WAYS[index] == _OURS
    points = [(row["peak_bytes"], row["measured"], row["setting"]) for row in rows]
    if ours:  # theirs in the order of their settings: some need more for a lower one
        points.sort()
    line = "L".join(f"{x(nbytes):.1f} {y(cost):.1f}" for nbytes, cost, _ in points)
    if len(points) > 1:
        strong = " strong" if ours else ""
        yield tag("path", class_=f"speed a{index}{strong}", d=f"M{line}")
    for nbytes, cost, setting in points:
        title = f"{_WAYS[index]} {setting}: {nbytes / _MIB:.1f} MiB, {cost:.3f}"
        yield marker(index, x(nbytes), y(cost), title=title, filled=ours)


if __name__ == "__main__":
    sys.exit(main())
