"""Options that cannot be combined: one table, which every face keeps."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import mucudnn.torch as mt
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.plan_program import REFUSALS, PlanOptions

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # what Inductor imports
]

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "torch_refusals.md"

VALUES = {
    "split": 2,
    "inductor": True,
    "offload_state": True,
    "tiers": "host",
    "tuner": Tuner(backend=mt.cpu_backend(), cache=None),
}
"""What is given for an option that is refused."""

CASES = [(refusal, face) for refusal in REFUSALS for face in refusal.faces]
NAMES = [f"{face}: {' and '.join(refusal.options)}" for refusal, face in CASES]


def construct(face, **options):
    """Call a face, as users do; `backend` by the name that takes any option."""
    model = nn.Linear(3, 2)
    if face == "train_step":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        mt.train_step(model, nn.functional.mse_loss, optimizer, **options)
    else:
        torch.compile(model, backend="mucudnn", options=options)(torch.ones(1, 3))


@pytest.mark.parametrize(("refusal", "face"), CASES, ids=NAMES)
def test_a_combination_is_refused_with_a_reason_and_what_works(refusal, face):
    options = {name: VALUES[name] for name in refusal.options}
    words = re.escape(f": {refusal.reason}; {refusal.instead}")
    for make in (construct, PlanOptions.of):
        with pytest.raises(ValueError, match=words) as caught:
            make(face, **options)
        assert all(f"{n}={v!r}" in str(caught.value) for n, v in options.items())
    if refusal.unless:
        assert PlanOptions.of(face, budget=1e6, **options)
    for name in refusal.options if len(refusal.options) > 1 else ():
        assert PlanOptions.of(face, budget=1e6, **{name: VALUES[name]})


@pytest.mark.parametrize(("refusal", "face"), CASES, ids=NAMES)
def test_a_refused_combination_is_documented(refusal, face):
    options = " and ".join(f"`{name}`" for name in refusal.options)
    without = f" without `{refusal.unless}`" if refusal.unless else ""
    row = f"| `{face}` | {options}{without} | {refusal.reason} | {refusal.instead} |"
    assert row in PAGE.read_text(), row
