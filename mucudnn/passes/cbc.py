"""CBC, the solver of linear programs with integers that PuLP ships, as plans use it."""

from typing import Any

__all__ = ["cbc", "import_pulp", "solver_errors"]


def import_pulp() -> Any:
    """PuLP, imported on first use: that takes longer than planning, and few need it.

    It keeps what importing absent solvers raised; the tracebacks are taken away, as
    they hold whoever asked first, and a trainer's memory with them.
    """
    import pulp

    for solver in vars(pulp.apis).values():
        if isinstance(error := getattr(solver, "err", None), BaseException):
            error.__traceback__ = None
    return pulp


def cbc(most_nodes: int, *, gap: float = 0.0, mip: bool = True) -> Any:
    """CBC, bounded by its nodes, by no clock: a program has one answer everywhere.

    Args:
        most_nodes: Of its tree; then it returns the best it has.
        gap: How far from the best possible is good enough, as a fraction.
        mip: Whether to keep integers whole.
    """
    return import_pulp().PULP_CBC_CMD(
        msg=False,
        mip=mip,
        threads=1,
        maxNodes=most_nodes,
        gapRel=gap or None,
        options=["randomSeed 1", "randomCbcSeed 1"],
    )


def solver_errors() -> tuple[type[Exception], ...]:
    """What is raised where CBC cannot be run."""
    try:
        from pulp import PulpError
    except ImportError:
        return (ImportError, OSError)
    return (PulpError, OSError)
