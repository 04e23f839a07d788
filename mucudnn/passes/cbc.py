"""CBC, the solver of linear programs with integers that PuLP ships, as plans use it."""

from typing import Any

__all__ = ["cbc", "solver_errors"]


def cbc(most_nodes: int, *, gap: float = 0.0, mip: bool = True) -> Any:
    """CBC, bounded by its nodes, by no clock: a program has one answer everywhere.

    Args:
        most_nodes: Of its tree; then it returns the best it has.
        gap: How far from the best possible is good enough, as a fraction.
        mip: Whether to keep integers whole.
    """
    # Imported here: it takes longer than planning does, and few plans need it.
    import pulp

    return pulp.PULP_CBC_CMD(
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
