"""Micro-batched convolutions and memory-planned training graphs."""

from mucudnn.backends import get_backend as get_backend
from mucudnn.errors import MucudnnError as MucudnnError
from mucudnn.ir.conv import (
    AlgoPerf as AlgoPerf,
    ConvPlan as ConvPlan,
    ConvProblem as ConvProblem,
    Direction as Direction,
    PerfTable as PerfTable,
)
