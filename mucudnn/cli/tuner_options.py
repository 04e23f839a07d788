"""Options of a tuner, and the tuner and the cache that they describe."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.cli.options import (
    backend_option,
    batch_policy_option,
    byte_size,
    cache_option,
    completing,
    flag,
    group,
    option,
    parsed,
    real,
    strategy,
    table,
)
from mucudnn.ir.numerics import NUMERICS, Numerics

if TYPE_CHECKING:
    from mucudnn.runtime.store.measurements import BenchmarkCache
    from mucudnn.runtime.tuning.tuner import Tuner

_SQLITE = b"SQLite format 3\0"


def _parse_numerics(text: str | Numerics) -> Numerics:
    return text if isinstance(text, Numerics) else parsed(text, Numerics.parse)


def _apply_old_policy(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> None:
    """Apply the old spelling unless the new one is given, too."""
    del parameter
    if value is not None and not ctx.resilient_parsing:
        click.echo(
            "mucudnn: warning: --policy is a residency policy elsewhere; micro-batch "
            f"sizes are chosen by --batch-policy {value}",
            err=True,
        )
        ctx.default_map = {**(ctx.default_map or {}), "batch_policy": value}


limit_options = group(
    option(
        "--memory-limit SIZE",
        "Memory for operands and workspace while measuring.",
        byte_size,
    ),
    option(
        "--time-limit SECONDS",
        "Time limit of the whole command.",
        real(beyond=True, of="seconds"),
    ),
)
"""Limits on measuring."""

measuring_options = group(
    backend_option("cpu, cuda, null, or recorded:FILE"),
    batch_policy_option,
    click.option(
        "--policy",
        "old_batch_policy",
        metavar="NAME",
        hidden=True,
        is_eager=True,
        expose_value=False,
        callback=_apply_old_policy,
    ),
    strategy(
        "--planner",
        "Micro-batch planner; workspace_reuse by default.",
        table("microbatch", "PLANNERS"),
    ),
    option(
        "--numerics WORD,…",
        f"Allowed numerics, of: {', '.join(NUMERICS)}.",
        _parse_numerics,
        complete=completing(lambda _: NUMERICS, several=True),
    ),
    flag(
        "--exhaustive",
        "With batch policy all, also measure sizes that cannot be part of a good plan.",
    ),
    cache_option,
)
"""Options of a tuner; defaults come from the environment."""


def make_tuner(settings: Mapping[str, Any], **more: Any) -> "Tuner":
    """Return a tuner from the given options and the environment."""
    from mucudnn.runtime.tuning.tuner import Tuner

    names = "backend batch_policy planner numerics memory_limit workspace_limit"
    chosen = {name: settings.get(name) for name in names.split()}
    given = {name: value for name, value in chosen.items() if value is not None}
    if settings.get("exhaustive"):
        given["prune"] = False
    with bad_input():
        if settings["cache_path"] is not None:
            given["cache"] = open_cache(settings["cache_path"])
        return Tuner.from_env(**given, **more)


def open_cache(path: str | None) -> "BenchmarkCache":
    """Open the cache at `path`, in memory for `none`, else the user's."""
    from mucudnn.runtime.environment import cache_path
    from mucudnn.runtime.store.measurements import BenchmarkCache
    from mucudnn.runtime.store.sqlite_file import IN_MEMORY_ONLY

    if path is None:
        return BenchmarkCache(cache_path(os.environ))
    if path == "none":
        return BenchmarkCache()
    refuse_foreign_file(Path(path))
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        cache = BenchmarkCache(Path(path))
    if cache.path is None:
        cache.close()
        reasons = (str(w.message).removeprefix(IN_MEMORY_ONLY) for w in complaints)
        raise BadInputError(f"cannot keep a cache in {path}: {'; '.join(reasons)}")
    for complaint in complaints:
        click.echo(f"mucudnn: warning: {complaint.message}", err=True)
    return cache


def refuse_foreign_file(path: Path) -> None:
    """Refuse a file that is not a cache: it would be replaced as damaged."""
    with bad_input():
        if not path.is_file():
            return
        with path.open("rb") as file:
            start = file.read(len(_SQLITE))
    if start and start != _SQLITE:
        raise BadInputError(
            f"{path} is not a cache but some other file; name another one"
        )
