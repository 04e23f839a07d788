"""Access to CBC, the integer linear programming solver that PuLP ships."""

from typing import Any


def import_pulp() -> Any:
    """Import PuLP on first use, as the import takes longer than most plans."""
    import pulp

    # PuLP keeps the exceptions of absent solvers. Their tracebacks would keep the first
    # caller's frames alive, and with them a trainer's memory.
    for solver in vars(pulp.apis).values():
        if isinstance(error := getattr(solver, "err", None), BaseException):
            error.__traceback__ = None
    return pulp


def cbc(most_nodes: int, *, gap: float = 0.0, mip: bool = True) -> Any:
    """Return a CBC solver limited by nodes, not by time, so that results reproduce.

    Args:
        most_nodes: Limit of the branch-and-bound tree; the best solution so far is
            returned when it is reached.
        gap: Relative optimality gap at which the search may stop.
        mip: Whether to enforce integrality.
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
    """Return the exceptions raised where CBC cannot be run."""
    try:
        from pulp import PulpError
    except ImportError:
        return (ImportError, OSError)
    return (PulpError, OSError)
