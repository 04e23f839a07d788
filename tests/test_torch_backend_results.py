"""What a compiled graph returns is the caller's, to be changed in place."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import PlanningError
from tests.torch_marks import COMPILED

pytestmark = COMPILED


class Net(nn.Module):
    """Two layers; their loss comes with all that is between them."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 3)
        self.reduction = reduction

    def forward(self, x, targets, count):
        linear = self.first(x)
        read = functional.silu(linear)
        logits = self.last(read)
        losses = logits.flatten(0, -2), targets.flatten()
        loss = functional.cross_entropy(*losses, reduction=self.reduction)
        if self.reduction == "sum":
            loss = loss / count
        return {"loss": loss, "logits": logits, "read": read, "linear": linear}


def gradients(reduction, change, backend, shape=(4, 5)):
    """Of the loss, after its graph's results were changed; `eager` for no backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(reduction)
    call = net if backend == "eager" else torch.compile(net, backend=backend)
    batch = torch.randn(*shape, 8), torch.randint(3, shape), torch.tensor(20)
    found = call(*batch)
    change(found)
    found["loss"].backward()
    return [parameter.grad for parameter in net.parameters()]


def backends(reduction):
    """Without a limit, and with the least one."""
    with pytest.raises(PlanningError) as caught:
        gradients(reduction, dict, mt.backend(budget=0, cache=None))
    least = caught.value.least_bytes
    return [mt.backend(budget=budget, cache=None) for budget in (None, least)]


def halved(name):
    def change(found):
        found[name] /= 2

    return change


def halved_in_a_view(name):
    def change(found):
        found[name].view(-1).detach().mul_(0.5)

    return change


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["loss", "logits"])
def test_a_result_that_the_backward_pass_does_not_read(reduction, name):
    """As trainers do that divide the loss by a count."""
    wanted = gradients(reduction, halved(name), "eager")
    for backend in backends(reduction):
        found = gradients(reduction, halved(name), backend)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("name", "shape"), [("read", (4, 5)), ("linear", (4,))])
def test_a_result_that_the_backward_pass_reads(name, shape):
    """The weights' gradient reads a view of it, or the activation's reads it."""
    for backend in ("eager", *backends("mean")):
        for changed in (halved, halved_in_a_view):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients("mean", changed(name), backend, shape)


def test_a_loss_that_only_eager_mode_reads_again():
    """A norm's gradient needs it; what it is needed for is computed before it leaves.

    So nothing that has changed is read, and the gradients are those of what it was.
    """

    def run(change, backend):
        torch._dynamo.reset()
        x = torch.arange(1.0, 5.0, requires_grad=True)

        def norm(x):
            return (2 * x).norm()

        call = norm if backend is None else torch.compile(norm, backend=backend)
        change(call(x)).backward()
        return x.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(lambda loss: loss.div_(2), None)
    found = run(lambda loss: loss.div_(2), mt.backend(cache=None))
    assert torch.equal(found, run(lambda loss: loss / 2, None))
