"""Options of a tuner, and the tuner they describe."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import bad_input, completing
from mucudnn.cli.cache import cache_option, open_cache
from mucudnn.cli.options import (
    byte_size,
    flag,
    group,
    option,
    parsed,
    real,
    strategy,
    table,
)
from mucudnn.ir.numerics import NUMERICS, Numerics
from mucudnn.ir.sizes import format_bytes

if TYPE_CHECKING:
    from mucudnn.runtime.tuning.tuner import Tuner

_BATCH_POLICY = "batch_policy"


def _batch_policies() -> tuple[Iterable[str], Callable[[str], object]]:
    from mucudnn.passes.microbatch import BATCH_POLICIES, candidate_batches

    return BATCH_POLICIES.table, lambda name: candidate_batches(1, name)


def backends(ctx: click.Context) -> Iterable[str]:
    """Return the names of all backends, available or not."""
    from mucudnn.backends import backend_names

    del ctx
    return backend_names()


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
        ctx.default_map = {**(ctx.default_map or {}), _BATCH_POLICY: value}


batch_policy_option = strategy(
    "--batch-policy", "Micro-batch sizes; powers_of_two by default.", _batch_policies
)

_old_spelling = click.option(
    "--policy",
    "old_batch_policy",
    metavar="NAME",
    hidden=True,
    is_eager=True,
    expose_value=False,
    callback=_apply_old_policy,
)

workspace_option = option(
    "--workspace-limit SIZE",
    f"Workspace of a convolution; by default {format_bytes(64 << 20)}.",
    byte_size,
)

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
    option(
        "--backend NAME",
        "cpu, cuda, null, or recorded:FILE; see `mucudnn info`.",
        default="cpu",
        complete=completing(backends),
    ),
    batch_policy_option,
    _old_spelling,
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
    if settings["exhaustive"]:
        given["prune"] = False
    with bad_input():
        if settings["cache_path"] is not None:
            given["cache"] = open_cache(settings["cache_path"])
        return Tuner.from_env(**given, **more)
