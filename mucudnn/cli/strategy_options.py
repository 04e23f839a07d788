"""Options whose values are names in tables: checked when they are read, listed by help.

Tables are looked at only then: what `--import` registers and what is installed counts.
"""

from collections.abc import Callable, Iterable
from typing import Any

import click

__all__ = [
    "StrategyOption",
    "batch_policies",
    "names_of_all",
    "optimizers",
    "orders",
    "planners",
    "policies",
    "schedulers",
]

Table = Callable[[], tuple[Iterable[str], Callable[[str], object]]]
"""() -> the names in a table, and what raises ValueError for one that is not there."""


def policies() -> tuple[Iterable[str], Callable[[str], object]]:
    """What leaves and what is computed again."""
    from mucudnn.passes.planning.plan_step import check_policy, policy_names

    return policy_names(), check_policy


def schedulers() -> tuple[Iterable[str], Callable[[str], object]]:
    """When copies run."""
    from mucudnn.passes.scheduling import SCHEDULERS

    return SCHEDULERS.names, SCHEDULERS.resolve


def planners() -> tuple[Iterable[str], Callable[[str], object]]:
    """What divides mini-batches."""
    from mucudnn.passes.microbatch import PLANNERS

    return PLANNERS.names, PLANNERS.resolve


def batch_policies() -> tuple[Iterable[str], Callable[[str], object]]:
    """Micro-batch sizes."""
    from mucudnn.passes.microbatch import BATCH_POLICIES, candidate_batches

    return BATCH_POLICIES.table, lambda name: candidate_batches(1, name)


def orders() -> tuple[Iterable[str], Callable[[str], object]]:
    """In which order nodes run."""
    from mucudnn.passes.ordering import ORDERS

    return ORDERS.names, ORDERS.resolve


def optimizers() -> tuple[Iterable[str], Callable[[str], object]]:
    """How weights change."""
    from mucudnn.ir.optimizers import OPTIMIZERS, parse_optimizer

    return OPTIMIZERS, parse_optimizer


def names_of_all(table: Table) -> tuple[str, ...]:
    """Every name in a table that is of use; a warning tells of those that are not."""
    names, check = table()
    found = []
    for name in names:
        try:
            check(name)
        except ValueError:
            continue
        found.append(name)
    return tuple(found)


class StrategyOption(click.Option):
    """An option that takes a name in a table.

    Args:
        declarations: Of the option.
        table: Names that there are.
        several: Whether a comma list is taken, or a word for all of the table.
        settings: Whatever else an option has.
    """

    def __init__(
        self,
        declarations: list[str],
        *,
        table: Table,
        several: str | None = None,
        **settings: Any,
    ) -> None:
        self._table = table
        self._several = several
        self._text = settings.get("help", "")
        settings.setdefault("metavar", "NAME" if several is None else "NAME,…")
        super().__init__(declarations, type=self._read, **settings)

    def _read(self, text: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(text, tuple):
            return text
        if self._several is None:
            self._check(text)
            return text
        words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        for word in words:
            if word != self._several:
                self._check(word)
        return words

    def _check(self, name: str) -> None:
        _, check = self._table()
        try:
            check(name)
        except ValueError as e:
            more = "" if self._several is None else f", or {self._several}"
            raise click.BadParameter(f"{e}{more}") from e

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """With the names that there are now."""
        names, _ = self._table()
        self.help = f"{self._text} One of: {', '.join(names)}."
        return super().get_help_record(ctx)
