"""DeepBench's own table: one row a convolution, times in microseconds.

Columns and their names are those that its `conv_bench` prints. DeepBench knows no
workspace limit; with several limits there is one table each.
"""

from collections.abc import Iterable, Sequence

from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.report.text import Table
from mucudnn.report.words import limit_text
from mucudnn.studies.outcome import Comparison

__all__ = ["check_deepbench", "deepbench_tables"]

_COLUMNS = (
    *("w", "h", "c", "n", "k", "f_w", "f_h", "pad_w", "pad_h"),
    *("stride_w", "stride_h", "precision"),
    *("fwd_time", "bwd_inputs_time", "bwd_params_time", "total_time"),
)
_PRECISION = {
    "float16": "half",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
}
_NOT_TIMED = "-"


def check_deepbench(problems: Iterable[ConvProblem]) -> None:
    """Refuse what DeepBench's columns cannot say.

    Raises:
        ValueError: A problem is not 2-D, is grouped or dilated.
    """
    for problem in problems:
        rank = len(problem.x_shape) - 2
        if rank != 2 or problem.groups != 1 or set(problem.dilation) != {1}:
            raise ValueError(
                "DeepBench's table has columns for ungrouped, undilated 2-D "
                f"convolutions only, this one is {rank}-D with {problem.groups} "
                f"groups and dilation {problem.dilation}; use the format 'table'"
            )


def deepbench_tables(comparison: Comparison) -> tuple[Table, ...]:
    """One table a limit, planned times.

    Raises:
        ValueError: A problem does not fit the columns.
    """
    check_deepbench(layer.problem for layer in comparison.layers)
    several = len(comparison.limits) > 1
    return tuple(
        Table(
            f"# workspace limit {limit_text(limit)}" if several else "",
            tuple(f">{column}" for column in _COLUMNS),
            tuple(_rows(comparison, i)),
        )
        for i, limit in enumerate(comparison.limits)
    )


def _rows(comparison: Comparison, index: int) -> Iterable[tuple[str, ...]]:
    times: dict[tuple[str, ConvProblem], dict[Direction, float | None]] = {}
    for layer in comparison.layers:
        key = (layer.name, layer.problem.with_direction(Direction.FORWARD))
        choice = layer.outcomes[index].choice
        planned = None if choice is None else choice.planned_ms
        times.setdefault(key, {})[layer.direction] = planned
    for (_, problem), by_direction in times.items():
        measured = list(by_direction.values())
        cells = [_us(by_direction.get(d)) for d in Direction]
        yield (*_shape(problem), *cells, _us(_total(measured)))


def _shape(problem: ConvProblem) -> tuple[str, ...]:
    (n, c, h, w), (k, _, r, s) = problem.x_shape, problem.w_shape
    pads, strides = problem.padding[::-1], problem.stride[::-1]
    sizes = (w, h, c, n, k, s, r, *pads, *strides)
    return (*map(str, sizes), _PRECISION[problem.dtype])


def _total(times_ms: Sequence[float | None]) -> float | None:
    known = [time_ms for time_ms in times_ms if time_ms is not None]
    return sum(known) if len(known) == len(times_ms) else None


def _us(time_ms: float | None) -> str:
    return _NOT_TIMED if time_ms is None else f"{time_ms * 1e3:.0f}"
