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
from mucudnn.runtime.cache import BenchmarkCache as BenchmarkCache
from mucudnn.runtime.conv import (
    conv1d as conv1d,
    conv2d as conv2d,
    conv3d as conv3d,
    conv_backward_data as conv_backward_data,
    conv_backward_filter as conv_backward_filter,
    explain as explain,
)
from mucudnn.runtime.execution import run_plan as run_plan
from mucudnn.runtime.tuner import Tuner as Tuner
