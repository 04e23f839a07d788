"""Print results in DeepBench's format: one row per convolution, times in microseconds.

Columns and their names are those of its `conv_bench`. DeepBench has no workspace limit;
each limit has its own table.
"""

from collections.abc import Iterable

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
    """Refuse problems that DeepBench's columns cannot describe.

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
    """Return one table of planned times per limit.

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
        cells = [_microseconds_text(by_direction.get(d)) for d in Direction]
        known = [ms for ms in by_direction.values() if ms is not None]
        total = sum(known) if len(known) == len(by_direction) else None
        yield (*_shape(problem), *cells, _microseconds_text(total))


def _shape(problem: ConvProblem) -> tuple[str, ...]:
    (n, c, h, w), (k, _, r, s) = problem.x_shape, problem.w_shape
    pads, strides = problem.padding[::-1], problem.stride[::-1]
    sizes = (w, h, c, n, k, s, r, *pads, *strides)
    return (*map(str, sizes), _PRECISION[problem.dtype])


def _microseconds_text(time_ms: float | None) -> str:
    return _NOT_TIMED if time_ms is None else f"{time_ms * 1e3:.0f}"
