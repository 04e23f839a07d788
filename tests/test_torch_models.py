"""Networks that people train, planned: eager mode's bits, and a peak that is kept."""

from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from bench.torch.zoo import ZOO  # noqa: E402
from tests.torch_steps import real_peak  # noqa: E402
from tests.torch_zoo import (  # noqa: E402
    SMALL,
    Steps,
    adamw,
    different,
    eager,
    sgd,
)

pytestmark = [
    pytest.mark.torch,
    # PyTorch's allocator says so when a profiler begins, once a process.
    pytest.mark.filterwarnings("ignore:.*profiling.*"),
    # Of PyTorch's own modules and timm's, as they are imported and traced.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SHARES = (1.0, 0.5, 0.3, 0.1, 0.0)
"""Of what there is between the least budget and what is needed without one."""

SEVERAL = [
    *(pytest.param(name, 3) for name in SMALL),
    *(pytest.param(name, 10, marks=pytest.mark.slow) for name in ZOO),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in a fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def needs_packages(name):
    if name in ZOO and not all(map(find_spec, ("torchvision", "timm"))):
        pytest.skip("needs torchvision and timm: the extra zoo")


def kept(steps, wanted, budget, count):
    """A step that trains as eager PyTorch does, in bytes that were promised."""
    found, step, batch = steps.trained(budget, count)
    assert different(found, wanted) == []
    plan = step.plan
    assert plan.peak_bytes <= budget
    beyond = real_peak(lambda: step(*batch))
    assert 0 < beyond <= plan.peak_bytes - plan.resident_bytes
    return plan


@pytest.mark.parametrize(("name", "count"), SEVERAL)
def test_steps_are_eager_ones_within_every_budget(name, count):
    optimizer_of = adamw if name in ("vit", "small gpt") else sgd
    needs_packages(name)
    wanted = eager(name, optimizer_of, count)
    steps = Steps(name, optimizer_of)
    most = kept(steps, wanted, float("inf"), count).peak_bytes
    least = steps.least_budget()
    assert least < most
    for share in SHARES if name in ZOO else (0.3, 0.0):
        kept(steps, wanted, int(least + share * (most - least)), count)
