"""What the comparisons say: speed-ups, the figures aimed at, and where each pays."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.job import read_json
from bench.gpu.work import LIMITS, Stage
from bench.table import render

_AIMED_STAGE = ("tf32", "NCHW")
_AIMED_LIMIT = 64 << 20
_AIMED_SUITE = "deepbench"
_AIMS = {"geomean": 1.6, "best": 4.5, "least": 0.98}
"""At 64 MiB, TF32 and NCHW, over DeepBench: each at least."""

_LAYOUT_HEADER = (
    *("stage", "layer", "NCHW divided ms", "NHWC undivided ms", "ratio", "better"),
)

_PAYS = 1.02
"""Ratios beyond this count as a gain."""


def digest(out: Path, stages: Sequence[Stage]) -> dict[str, Any]:
    """Every comparison that is there, in short."""
    tables = {
        stage: {row["key"]: row for row in rows if row["complete"]}
        for stage in stages
        if (rows := read_json(out / stage.file).get("layers"))
    }
    summaries = [_summary(stage, rows.values()) for stage, rows in tables.items()]
    aimed = next(
        (s for s in summaries if (s["name"], s["layout"]) == _AIMED_STAGE), None
    )
    return {
        "stages": summaries,
        "aims": None if aimed is None else _aims(aimed),
        "layouts": list(_layouts(tables)),
    }


def digest_text(result: Mapping[str, Any], *, brief: bool = False) -> str:
    """The same for people; in brief, layouts are counted instead of listed."""
    names = ("suite", "limit_mib", "layers", "geomean", "best", "least", "pays")
    rows = [
        (f"{s['name']} {s['layout']}", *(g[name] for name in names))
        for s in result["stages"]
        for g in s["groups"]
    ]
    header = ("stage", "suite", "MiB", "layers", "geomean", "best", "least", "gain")
    parts = ["undivided / divided", render(header, rows) if rows else "nothing yet"]
    if result["aims"] is not None:
        parts.append("\n".join(map(_aim_text, result["aims"])))
    if brief:
        parts.append(_layout_counts(result["layouts"]))
    elif result["layouts"]:
        parts.append(
            render(
                _LAYOUT_HEADER,
                [tuple(row.values()) for row in result["layouts"]],
            )
        )
    return "\n\n".join(parts)


def geomean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    if not values:
        return None
    return math.exp(sum(map(math.log, values)) / len(values))


def _summary(stage: Stage, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    groups: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        suite = row["name"].split("_")[0].split("/")[0]
        for plan in row["plans"]:
            if plan["speedup"] is not None:
                group = groups.setdefault((suite, plan["workspace_limit"]), {})
                group[row["key"]] = plan["speedup"]
    return {
        "name": stage.name,
        "layout": stage.layout,
        "groups": [
            {
                "suite": suite,
                "limit_mib": limit >> 20,
                "layers": len(found),
                "geomean": geomean(list(found.values())),
                "best": max(found.values()),
                "best_layer": max(found, key=found.__getitem__),
                "least": min(found.values()),
                "least_layer": min(found, key=found.__getitem__),
                "pays": sum(speedup > _PAYS for speedup in found.values()),
            }
            for (suite, limit), found in sorted(groups.items())
        ],
    }


def _aims(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    mib = _AIMED_LIMIT >> 20
    for group in summary["groups"]:
        if group["suite"] == _AIMED_SUITE and group["limit_mib"] == mib:
            return [
                {
                    "figure": name,
                    "aim": aim,
                    "found": group[name],
                    "of": group["layers"],
                }
                for name, aim in _AIMS.items()
            ]
    return []


def _aim_text(aim: Mapping[str, Any]) -> str:
    verdict = "reached" if aim["found"] >= aim["aim"] else "MISSED"
    return (
        f"{aim['figure']} over {aim['of']} layers at {_AIMED_LIMIT >> 20} MiB: "
        f"{aim['found']:.2f}, aim {aim['aim']:.2f}: {verdict}"
    )


def _layouts(
    tables: Mapping[Stage, Mapping[str, Mapping[str, Any]]],
) -> Iterator[dict[str, Any]]:
    """Channels first and divided against channels last and undivided, at 64 MiB."""
    by_name = {(stage.name, stage.layout): rows for stage, rows in tables.items()}
    for (name, layout), rows in by_name.items():
        last = by_name.get((name, "NHWC"), {})
        if layout != "NCHW":
            continue
        for key, row in rows.items():
            divided = _plan(row).get("planned_ms")
            undivided = _plan(last[key]).get("undivided_ms") if key in last else None
            if not divided or not undivided:
                continue
            ratio = divided / undivided
            better = "NHWC" if ratio > _PAYS else "NCHW" if ratio < 1 / _PAYS else "-"
            yield {
                "name": name,
                "key": key,
                "nchw_divided_ms": divided,
                "nhwc_undivided_ms": undivided,
                "ratio": ratio,
                "better": better,
            }


def _layout_counts(layouts: Sequence[Mapping[str, Any]]) -> str:
    better = Counter((row["name"], row["better"]) for row in layouts)
    return "\n".join(
        f"{name}: NHWC undivided is faster than NCHW divided on {better[name, 'NHWC']} "
        f"layers, slower on {better[name, 'NCHW']}, as fast on {better[name, '-']}"
        for name in dict.fromkeys(row["name"] for row in layouts)
    )


def _plan(row: Mapping[str, Any]) -> Mapping[str, Any]:
    position = LIMITS.index(_AIMED_LIMIT)
    plan: Mapping[str, Any] = row["plans"][position]
    return plan
