"""Linear programs, and CBC, the integer linear programming solver that PuLP ships."""

import math
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution of a `LinearProgram`.

    Attributes:
        objective: Value of the objective; infinity if nothing is feasible.
        values: Value of each variable; none if nothing is feasible.
    """

    objective: float
    values: Sequence[float]


def import_pulp() -> Any:
    """Import PuLP on first use, as the import takes longer than most plans."""
    import pulp

    # PuLP keeps the exceptions of absent solvers. Their tracebacks would keep the first
    # caller's frames alive, and with them a trainer's memory.
    for solver in vars(pulp.apis).values():
        if isinstance(error := getattr(solver, "err", None), BaseException):
            error.__traceback__ = None
    return pulp


def cbc(most_nodes: int) -> Any:
    """Return a CBC solver limited by nodes, not by time, so that results reproduce.

    When the branch-and-bound tree has `most_nodes`, the best solution so far counts.
    """
    return import_pulp().PULP_CBC_CMD(
        msg=False,
        threads=1,
        maxNodes=most_nodes,
        options=["randomSeed 1", "randomCbcSeed 1"],
    )


def solver_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions raised where CBC cannot be run."""
    try:
        from pulp import PulpError
    except ImportError:
        return (ImportError, OSError)
    return (PulpError, OSError, subprocess.CalledProcessError)


class LinearProgram:
    """A sparse linear program that is minimized.

    Variables and rows are numbered in the order of their creation, and solvers see
    them in that order, so the same program has the same solution in every process.
    The program is handed over as an MPS file: PuLP's objects take longer to build than
    the solver needs for the programs of deep models.
    """

    def __init__(self) -> None:
        self._bounds: list[tuple[float, float]] = []
        self._costs: list[float] = []
        self._columns: list[list[tuple[int, float]]] = []
        self._rows: list[tuple[str, float]] = []
        self._written, self._basis = "", ""

    def __len__(self) -> int:
        return len(self._bounds)

    def variable(
        self, upper: float = 1.0, cost: float = 0.0, lower: float = 0.0
    ) -> int:
        """Add a variable and return its number."""
        self._bounds.append((lower, upper))
        self._costs.append(cost)
        self._columns.append([])
        return len(self._bounds) - 1

    def limit(self, terms: Iterable[tuple[int, float]], most: float) -> None:
        """Require a sum of variables times coefficients to be at most a value."""
        self._row("L", terms, most)

    def equal(self, terms: Iterable[tuple[int, float]], value: float) -> None:
        """Require a sum of variables times coefficients to equal a value."""
        self._row("E", terms, value)

    def _row(self, kind: str, terms: Iterable[tuple[int, float]], value: float) -> None:
        found: dict[int, float] = {}
        for variable, factor in terms:
            found[variable] = found.get(variable, 0.0) + factor
        for variable, factor in found.items():
            self._columns[variable].append((len(self._rows), factor))
        self._rows.append((kind, value))

    def solve(self, fixed: Mapping[int, float] | None = None) -> Solution | None:
        """Return an optimum, with given values of some variables.

        None if no simplex method ends. The next solution begins with the basis of the
        last optimum, from which the dual simplex method needs few iterations.

        Raises:
            One of `solver_errors`: No solver can be run.
        """
        with tempfile.TemporaryDirectory(prefix="mucudnn") as folder:
            path = Path(folder, "program.mps")
            path.write_text(self._mps(fixed or {}))
            basis = path.with_suffix(".bas")
            if self._basis:
                basis.write_text(self._basis)
            solution = _by_cbc(path, len(self), basis)
            if solution is not None and solution.values:
                self._basis = basis.read_text()
            return solution

    def _mps(self, fixed: Mapping[int, float]) -> str:
        # All but the bounds stays the same between solutions: write it once.
        if not self._written:
            lines = ["NAME program FREE", "ROWS", " N cost"]
            lines += [f" {kind} r{i}" for i, (kind, _) in enumerate(self._rows)]
            lines.append("COLUMNS")
            for i, cost in enumerate(self._costs):
                lines.append(f" x{i} cost {cost!r}")
                lines += [f" x{i} r{row} {value!r}" for row, value in self._columns[i]]
            lines.append("RHS")
            lines += [f" b r{i} {value!r}" for i, (_, value) in enumerate(self._rows)]
            self._written = "\n".join(lines)
        lines = [self._written, "BOUNDS"]
        for i, (lower, upper) in enumerate(self._bounds):
            if i in fixed:
                lines.append(f" FX b x{i} {fixed[i]!r}")
                continue
            if lower == -math.inf:
                lines.append(f" MI b x{i}")
            if upper != math.inf:
                lines.append(f" UP b x{i} {upper!r}")
        return "\n".join([*lines, "ENDATA\n"])


_ITERATIONS = 10_000, 3
"""Iterations of the simplex method, at least and for each variable, beyond which it is
ended: it may visit the same vertices for ever. Other programs need one a variable."""


def _by_cbc(path: Path, count: int, basis: Path) -> Solution | None:
    """Solve a program, from the basis in a file if there is one; write the last one."""
    program = import_pulp().PULP_CBC_CMD.pulp_cbc_path
    found = path.with_suffix(".txt")
    least, each = _ITERATIONS
    most = str(max(least, each * count))
    # The primal simplex method is ten times faster at finding that nothing is feasible.
    methods: list[tuple[str | Path, ...]] = [("-primalSimplex",), ("-dualSimplex",)]
    if basis.exists():  # it would be lost in a reduced program
        methods.insert(0, ("-presolve", "off", "-basisIn", basis, "-dualSimplex"))
    head, rows = "", []
    for method in methods:
        call = [program, path, "-randomSeed", "1", "-maxIterations", most, *method]
        subprocess.run(
            [*call, "-solution", found, "-basisOut", basis],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        head, *rows = found.read_text().splitlines()
        if not head.startswith("Stopped"):
            break
    # The first line has the status, such as "Optimal - objective value 12.5".
    if head.startswith("Infeasible"):
        return Solution(math.inf, ())
    if not head.startswith("Optimal"):
        return None
    values = [0.0] * count
    for row in rows:  # "**" marks variables that exceed a bound within the tolerance
        _, name, value, *_ = row.replace("**", "").split()
        values[int(name[1:])] = float(value)
    return Solution(float(head.rpartition(" ")[2]), values)
