"""What tests of one kind have in common: marks, and warnings that are PyTorch's own."""

import pytest

COMPILED = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread", "fresh_compiler"),
    # Of PyTorch's own modules, as Dynamo imports and traces them.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CONVOLUTIONS = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Using padding='same'"),  # what it costs PyTorch
]

STEPS_RUN = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    # PyTorch's allocator says so when a profiler begins, once a process.
    pytest.mark.filterwarnings("ignore:.*profiling.*"),
]
