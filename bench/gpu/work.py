"""Which layers are measured, in which data types and layouts, in which order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.gpu.job import Job
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.studies.convolutions import in_directions
from mucudnn.suites import Layer, load_suite

MIB = 1 << 20
LIMITS = tuple(mib * MIB for mib in (8, 64, 128, 256, 512))
"""Bytes of workspace."""

_BATCH = 256
_KERNELS = ((3, 3), (5, 5))
_WANTED_FIRST = (Direction.FORWARD, Direction.BACKWARD_FILTER, Direction.BACKWARD_DATA)


@dataclass(frozen=True, slots=True)
class Stage:
    """One way of computing.

    Attributes:
        name: Of the arithmetic.
        dtype: Of the operands.
        numerics: As `Numerics.parse` reads it.
        layout: `NCHW` or `NHWC`.
    """

    name: str
    dtype: str
    numerics: str
    layout: str

    @property
    def file(self) -> str:
        """Where its comparison goes."""
        return f"comparison-{self.name}-{self.layout}.json"

    @property
    def recording(self) -> str:
        """Where the measurements of its data type and layout go."""
        return recording_name(self.dtype, self.layout)

    def of(self, problem: ConvProblem) -> ConvProblem:
        """The problem in this data type and layout."""
        return replace(problem, dtype=self.dtype, layout=self.layout)


def recording_name(dtype: str, layout: str) -> str:
    """The file of one data type and layout."""
    return f"recording-{dtype}-{layout}.json.gz"


STAGES = tuple(
    Stage(name, dtype, numerics, layout)
    for layout in ("NCHW", "NHWC")
    for name, dtype, numerics in (
        ("tf32", "float32", "tf32"),
        ("float16", "float16", "tf32"),
        ("strict", "float32", "strict"),
        ("bfloat16", "bfloat16", "tf32"),
    )
)
"""The most wanted first."""


def deepbench_layers(job: Job) -> Sequence[Layer]:
    """DeepBench's 3x3 and 5x5 shapes, each once, and AlexNet, in all directions."""
    shapes: dict[ConvProblem, str] = {}
    for layer in load_suite("deepbench_train"):
        problem = layer.problem.with_batch(job.batch or _BATCH)
        if problem.w_shape[2:] in _KERNELS:
            shapes.setdefault(problem, layer.name)
    deepbench = [Layer(name, problem) for problem, name in shapes.items()]
    both = [*_some(job, deepbench), *_some(job, _network(job, "alexnet"))]
    return [
        layer
        for direction in _WANTED_FIRST
        for layer in in_directions(both, [direction])
    ]


def network_layers(job: Job, suite: str) -> Sequence[Layer]:
    """A training step's convolutions; the input needs no gradient."""
    layers = _some(job, _network(job, suite))
    return [
        layer
        for i, one in enumerate(layers)
        for layer in in_directions([one], list(Direction))
        if i or layer.problem.direction is not Direction.BACKWARD_DATA
    ]


def key_of(name: str, problem: ConvProblem) -> str:
    """A layer and its direction, the same in every data type and layout."""
    return f"{name} {problem.direction.value}"


def _network(job: Job, suite: str) -> Iterator[Layer]:
    for layer in load_suite(suite):
        batch = job.batch or layer.problem.batch
        problem = layer.problem.with_batch(batch)
        yield replace(layer, name=f"{suite}/{layer.name}", problem=problem)


def _some(job: Job, layers: Sequence[Layer] | Iterator[Layer]) -> list[Layer]:
    return list(layers)[: job.layers]
