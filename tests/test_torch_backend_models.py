"""What models may do under `torch.compile` within a budget: eager's bits in all."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  (where there is PyTorch)
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from tests.torch_backends import (  # noqa: E402
    WithLoss,
    backwards,
    check_against_eager,
)
from tests.torch_marks import COMPILED  # noqa: E402
from tests.torch_steps import TinyGPT, token_loss  # noqa: E402

pytestmark = COMPILED

WIDTH = 48


class Model(nn.Module):
    """Two layers, and what a test does with them."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for name, module in modules.items():
            setattr(self, name, module)
        self.function = forward

    def forward(self, *batch):
        return self.function(self, *batch)

    def hidden(self, x):
        return functional.gelu(self.first(x)).relu() * 2


def maker(forward, inputs=1, change=None, needs=False, **modules):
    def make():
        torch.manual_seed(0)
        made = {name: module() for name, module in modules.items()}
        model = Model(forward, **made)
        if change is not None:
            change(model)
        return model, [
            torch.randn(64, WIDTH).requires_grad_(needs) for _ in range(inputs)
        ]

    return make


def run_all(call, *batch):
    return backwards(*call(*batch))


def test_several_results_of_which_one_needs_no_gradient():
    def forward(self, x):
        y = self.second(self.hidden(x))
        return y.argmax(1), y.detach() * 3, y.tanh(), y.sigmoid()

    def run(call, x):
        chosen, scaled, left, right = call(x)
        assert not chosen.requires_grad
        assert not scaled.requires_grad
        (left.sum() + right.square().sum()).backward()
        return chosen, scaled, left, right

    check_against_eager(maker(forward), run, measured=False)


def two_losses(self, x):
    y = self.second(self.hidden(x))
    return y.square().mean(), y.abs().mean()


def the_sum(call, x):
    first, second = call(x)
    (first + second).backward()
    return first, second


def one_of_two(call, x):
    first, second = call(x)
    second.backward()
    return first, second


@pytest.mark.parametrize("run", [run_all, the_sum, one_of_two])
def test_two_losses(run):
    check_against_eager(maker(two_losses), run, measured=False)


def test_inputs_that_need_gradients():
    def forward(self, x, y):
        return self.second(self.hidden(x) * y).square().mean()

    check_against_eager(maker(forward, inputs=2, needs=True))


def test_frozen_parameters():
    def freeze(model):
        model.first.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.second(self.hidden(x)).square().mean()

    check_against_eager(maker(forward, change=freeze))


def test_tied_weights():
    def tie(model):
        model.second.weight = model.first.weight

    def forward(self, x):
        return self.second(self.hidden(x)).square().mean()

    check_against_eager(maker(forward, change=tie))


def test_buffers_that_change():
    def count(model):
        model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        model.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.norm(self.hidden(x))
        self.calls += 1
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return (self.second(y) * self.average).square().mean()

    make = maker(forward, change=count, norm=lambda: nn.BatchNorm1d(WIDTH))
    check_against_eager(make)


def test_views_that_are_returned():
    def forward(self, x):
        y = self.second(self.hidden(x))
        return y.view(32, -1), y[:8].t(), x.view(32, -1)

    def run(call, x):
        wide, some, given = call(x)
        assert given.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert wide.untyped_storage().data_ptr() == some.untyped_storage().data_ptr()
        (wide.square().mean() + some.sum()).backward()
        return wide, some, given

    check_against_eager(maker(forward), run, measured=False)


def test_inputs_that_change():
    def forward(self, x):
        x.mul_(2).add_(1)
        return self.second(self.hidden(x)).square().mean()

    check_against_eager(maker(forward))


def test_dropout_and_attention_with_tied_weights():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = TinyGPT(width=WIDTH)

        def forward(self, x, y):
            return token_loss(self.model(x), y)

    def make():
        torch.manual_seed(0)
        tokens = torch.randint(0, 64, (2, 4, 32))
        return WithLoss(), [tokens[0], tokens[1]]

    _, least = check_against_eager(make)
    again = [name for name in least.recomputed if "dropout" in name or "rand" in name]
    assert again or least.leaving


def test_autocast_inside_and_around():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(self.hidden(x))
        return y.float().square().mean()

    check_against_eager(maker(forward))

    def plain(self, x):
        return self.second(self.hidden(x)).float().square().mean()

    def run(call, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(x)
        loss.backward()
        return [loss]

    check_against_eager(maker(plain), run)


def test_a_checkpoint_inside():
    def forward(self, x):
        y = checkpoint(self.hidden, x, use_reentrant=False)
        return self.second(functional.dropout(y, 0.1)).square().mean()

    check_against_eager(maker(forward))


@pytest.mark.filterwarnings("ignore:saved tensors of")
def test_gradients_of_several_backward_passes_add_up():
    def forward(self, x):
        return self.second(functional.dropout(self.hidden(x))).square().mean()

    def run(call, x):
        losses = [call(x * k) for k in (1, 2, 3)]
        for k in (1, 2, 0):
            losses[k].backward()
        return losses

    check_against_eager(maker(forward), run, measured=False)


def test_results_that_the_backward_pass_reads_stay_with_the_caller():
    def forward(self, x):
        y = self.hidden(x)
        z = functional.gelu(self.second(y))
        return y, z.exp(), z.tanh().square().mean()

    def run(call, x):
        hidden, grown, loss = call(x)
        held = hidden.clone(), grown.clone()
        loss.backward()
        return hidden, grown, loss, *held

    check_against_eager(maker(forward), run, measured=False)


def test_results_that_nothing_reads_may_be_changed():
    def forward(self, x):
        y = self.second(self.hidden(x))
        return y.square().mean(), y * 3

    def run(call, x):
        loss, scaled = call(x)
        scaled.detach().zero_()
        loss.detach().div_(2)
        loss.backward()
        return loss, scaled

    check_against_eager(maker(forward), run, measured=False)


def test_new_values_of_buffers_go_when_they_are_written_back():
    def peak(updates):
        torch.manual_seed(0)
        torch._dynamo.reset()
        layers = [nn.Linear(256, 256) for _ in range(6)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(256))
        model.register_buffer("average", torch.zeros(1024, 256))

        def loss(x):
            if updates:
                model.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return model(x).square().mean()

        backend = mt.backend(cache=None)
        torch.compile(loss, backend=backend)(torch.randn(8, 256)).backward()
        [plan] = backend.plans
        return plan.peak_bytes - plan.resident_bytes

    assert peak(True) < peak(False) + (64 << 10)  # of 1 MiB


def test_new_statistics_of_frozen_norms_are_there_when_the_forward_pass_is_over():
    """Nothing but those statistics keeps what they are made with from going."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU()),
            *(nn.Flatten(), nn.Linear(8 * 16, 5)),
        )
        for i in (0, 1, 3):
            model[i].requires_grad_(False)
        batch = torch.randn(2, 3, 8, 8), torch.randint(0, 5, (2,))
        return WithLoss(model, functional.cross_entropy), batch

    check_against_eager(make)
