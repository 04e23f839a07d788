"""`verify=N` finds what is not as in eager mode; steps raise what eager's raise."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import MucudnnError, VerificationError
from mucudnn.torch.execution.bound_step import BoundStep
from tests.torch_marks import STEPS_RUN
from tests.torch_own_updates import CountingInGroup, lbfgs
from tests.torch_programs import Program as TrainingProgram, compare, trained
from tests.torch_step_cases import CASES
from tests.torch_steps import build

pytestmark = STEPS_RUN


class Program:
    """A model of the usual layers, and everything that a step changes."""

    def __init__(self, optimizer_of=lambda p: optim.AdamW(p, 1e-2), **options):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)]
        self.model = nn.Sequential(*layers, nn.Linear(8, 3))
        self.optimizer = optimizer_of(self.model.parameters())
        self.batch = torch.randn(8, 6), torch.randn(8, 3)
        self.step = mt.train_step(
            self.model, self.loss, self.optimizer, cache=None, **options
        )

    @staticmethod
    def loss(out, y):
        return functional.mse_loss(out, y), {"out": out}

    def state(self):
        state = self.optimizer.state_dict()
        return copy.deepcopy([self.model.state_dict(), state, torch.get_rng_state()])


WRONG = {
    "the loss": lambda p, results: results[0],
    r"what comes back with the loss\['out'\]": lambda p, results: results[1],
    "parameter '4.weight'": lambda p, results: p.model[4].weight,
    "buffer '1.running_var'": lambda p, results: p.model[1].running_var,
    r"state exp_avg of parameter '0.bias'": lambda p, results: p.optimizer.state[
        p.model[0].bias
    ]["exp_avg"],
    r"the scaler\['scale'\]": lambda p, results: p.scaler._scale,
    r"the batch\[0\]": lambda p, results: p.batch[0],
}


def run_wrongly(monkeypatch, change):
    """Have planned steps change one element more, once they are over."""
    run = BoundStep.run

    def wrong(self, given, commit):
        results = run(self, given, commit)
        change(results)
        return results

    monkeypatch.setattr(BoundStep, "run", wrong)


@pytest.mark.parametrize("options", [{}, {"split": 2}])
def test_every_wrong_tensor_is_found_and_named(options, monkeypatch):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    program = Program(verify=1, scaler=scaler, **options)
    program.scaler = scaler
    for _ in range(3):
        program.step(*program.batch)
    for number, (name, find) in enumerate(WRONG.items(), 4):

        def change(results, find=find):
            with torch.no_grad():
                find(program, results).view(-1)[0] += 1e-2

        with monkeypatch.context() as patch:
            run_wrongly(patch, change)
            with pytest.raises(
                MucudnnError, match=f"step {number}: {name} differs"
            ) as e:
                program.step(*program.batch)
        assert isinstance(e.value, VerificationError)
        if name.startswith("parameter"):
            assert "1 of 24 elements, by at most 0.01 (" in str(e.value)


def test_what_is_drawn_otherwise_is_found(monkeypatch):
    program = Program(verify=1)
    run_wrongly(monkeypatch, lambda results: torch.rand(1))
    with pytest.raises(VerificationError, match="step 1: the CPU's random generator"):
        program.step(*program.batch)


def test_the_first_and_every_nth_step_are_checked(monkeypatch):
    program = Program(verify=3)
    run_wrongly(monkeypatch, lambda results: results[0].add_(1))
    wrong = []
    for number in range(1, 8):
        try:
            program.step(*program.batch)
        except VerificationError:
            wrong.append(number)
    assert wrong == [1, 3, 6]


@pytest.mark.parametrize("optimizer_of", [None, CountingInGroup, lbfgs])
def test_checked_steps_are_those_that_are_not_checked(optimizer_of):
    states = []
    for verify in (None, 1):
        options = {"verify": verify}
        if optimizer_of is not None:
            options["optimizer_of"] = optimizer_of
        program = Program(**options)
        weight = program.model[0].weight
        weight.grad = marker = torch.ones(8, 6)
        held = [*program.model.parameters(), *program.model.buffers()]
        pointers = [t.data_ptr() for t in held]
        program.step.prepare(*program.batch)
        torch.manual_seed(1)
        results = [program.step(*program.batch) for _ in range(3)]
        assert weight.grad is marker
        assert [t.data_ptr() for t in held] == pointers
        assert all(map(lambda a, b: a is b, program.model.buffers(), held[-3:]))
        states.append([results, program.state()])
    (first, form), (second, other) = map(torch.utils._pytree.tree_flatten, states)
    assert form == other
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_step_that_fails_in_eager_mode_leaves_everything():
    program = Program(verify=1, split=2)
    program.step(*program.batch)
    before = program.state()
    handle = program.optimizer.register_step_post_hook(fail)
    with pytest.raises(KeyError, match="hook"):
        program.step(*program.batch)
    handle.remove()
    after = program.state()
    assert all(map(torch.equal, before[0].values(), after[0].values()))
    assert before[1]["state"][0]["step"] == after[1]["state"][0]["step"] == 1
    assert torch.equal(before[2], after[2])


def fail(*_):
    raise KeyError("hook")


@pytest.mark.parametrize(
    "name", ["averaged_anew", "kept_for_the_loss", "channels_last"]
)
def test_models_that_replace_what_they_hold_are_equal(name):
    torch.manual_seed(0)
    model, loss_fn, batch = CASES[name]()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = mt.train_step(model, loss_fn, optimizer, cache=None, verify=1)
    held = list(model.buffers())
    names = set(vars(model))
    if name == "kept_for_the_loss":  # written by every step, as in eager mode
        names.add("last")
    step(*batch)
    step(*batch)
    assert all(a is b for a, b in zip(model.buffers(), held, strict=True))
    assert set(vars(model)) == names


def test_rounding_is_allowed_where_steps_are_rounded():
    """Bias before a batch norm: gradients are noise, updates are as large as others."""
    model, loss_fn, batch = build("cnn")
    optimizer = optim.Rprop(model.parameters())
    step = mt.train_step(model, loss_fn, optimizer, cache=None, split=2, verify=1)
    losses = [step(*batch).item() for _ in range(3)]
    assert len(set(losses)) == 3


def test_only_the_size_of_what_is_rounding_alone_is_checked(monkeypatch):
    """The bias before a batch norm has a gradient of 0, whose noise is squared."""
    model, loss_fn, batch = build("cnn")
    optimizer = optim.RMSprop(model.parameters(), 1e-4)
    step = mt.train_step(model, loss_fn, optimizer, cache=None, split=2, verify=1)
    step(*batch)
    squares = [state["square_avg"] for state in optimizer.state.values()]
    noise = min(squares, key=lambda square: square.max())
    factors = iter((10, 1e4))
    run_wrongly(monkeypatch, lambda _: noise.mul_(next(factors)))
    step(*batch)
    with pytest.raises(VerificationError, match="square_avg"):
        step(*batch)


class Solving(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, matrix):
        return torch.linalg.solve(matrix, self.linear(matrix)).sum()


def test_a_singular_matrix_raises_as_in_eager_mode_and_changes_nothing():
    model, singular = Solving(), torch.zeros(4, 4)
    with pytest.raises(torch.linalg.LinAlgError) as eager:
        model(singular)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, lambda loss: loss, optimizer, cache=None)
    step(torch.eye(4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(torch.linalg.LinAlgError) as planned:
        step(singular)
    assert str(planned.value) == str(eager.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert step(torch.eye(4)).isfinite()


def test_compiled_models_solve_and_raise_too():
    torch._dynamo.reset()
    model = Solving()
    backend = mt.backend(cache=None)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    matrix = torch.eye(4) + 0.1 * torch.rand(4, 4)
    loss = compiled(matrix)
    assert torch.equal(loss, model(matrix))
    grads = [
        torch.autograd.grad(m(matrix), [*m.parameters()]) for m in (compiled, model)
    ]
    assert all(map(torch.equal, *grads))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.zeros(4, 4))
    assert len(backend.plans) == 1


def check_planned(build):
    """Steps of a training are planned, and those of eager mode."""
    report = compare(TrainingProgram(build))
    assert not report.differences
    assert report.was_planned()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_mean_of_all_batches_goes_on_from_step_to_step(accumulate):
    def build():
        layers = nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4)
        model = nn.Sequential(*layers)
        return trained(
            model,
            options={"accumulate": accumulate},
            before=lambda number: model.train(number != 3),  # which does not count
            watched=lambda: model[1].momentum,
            steps=6,
        )

    check_planned(build)


def of_numbers(count=8):
    return [(torch.rand(count, 6), torch.rand(count, 4)) for _ in range(2)]


@pytest.mark.parametrize(
    ("var", "options"),
    [
        (torch.rand(8, 4) + 0.1, {}),
        (torch.rand(8) + 0.1, {"full": True, "reduction": "sum"}),
        (torch.zeros(8, 1), {"eps": 0.5}),
        (0.5, {"full": True}),
    ],
)
def test_variances_are_checked_in_the_step(var, options):
    def loss_fn(out, y):
        return functional.gaussian_nll_loss(out, y, var, **options)

    check_planned(
        lambda: trained(nn.Linear(6, 4), batches=of_numbers(), loss_fn=loss_fn)
    )


class Checked(nn.Linear):
    def forward(self, x):
        torch._assert_async((x < 1e3).all(), "not finite")
        return super().forward(x)


def test_a_negative_variance_raises_and_changes_nothing_nor_a_check_of_ones_own():
    model, x = Checked(4, 4), torch.rand(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_fn = nn.GaussianNLLLoss()
    step = mt.train_step(model, lambda out, y, v: loss_fn(out, y, v), optimizer)
    step(x, x, torch.ones(4, 4))
    before = copy.deepcopy(model.state_dict())
    for batch, message in (
        ((x, x, -torch.ones(4, 4)), "negative"),
        ((torch.full((4, 4), float("inf")), x, x), "not finite"),
    ):
        with pytest.raises(RuntimeError, match=message):
            step(*batch)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="incorrect size"):
        step(x, x, torch.ones(3, 4))


def test_distributions_check_their_arguments_in_the_step():
    class Mixed(nn.Linear):
        """Draws how much of a batch is mixed, and noise of a scale that is given."""

        def forward(self, x, scale):
            share = torch.distributions.Beta(0.5, 0.5).sample()
            mixed = share * x + (1 - share) * x.flip(0)
            noisy = torch.distributions.Normal(
                super().forward(mixed), scale, validate_args=True
            )  # Dynamo may have turned off that they do so by themselves
            return noisy.rsample()

    def build():
        batches = [((x, torch.ones(6)), x) for x, _ in of_numbers()]
        return trained(Mixed(6, 6), batches=batches, loss_fn=functional.mse_loss)

    check_planned(build)
    model, x = Mixed(6, 6), torch.rand(2, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, functional.mse_loss, optimizer, cache=None)
    step((x, torch.ones(6)), x)
    with pytest.raises(RuntimeError, match="distribution"):
        step((x, -torch.ones(6)), x)
