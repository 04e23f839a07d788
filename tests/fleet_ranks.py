"""Processes that train together, on the loopback device, bounded in time."""

import importlib
import json
import multiprocessing
import os
import time
from contextlib import contextmanager

from tests.rank_networks import NETWORKS

SECONDS = 280
EPOCHS, BATCH, SAMPLES = 2, 12, 30
RATES = {"mean": 0.1, "sum": 0.01}

FORKED = multiprocessing.get_context("forkserver")
"""Ranks are forked where PyTorch is imported: each would do so for seconds."""
FORKED.set_forkserver_preload(["tests.sharded_steps", "mucudnn.torch"])


def run_rank(store, rank, size, work):
    """Do something among others that meet at the file `store`; end the process."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    work()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and abort an interpreter's end


def become_rank(module, scenario, rank, size, folder):
    """Run the `main` of a module as one of the ranks, with its errors in a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    with (folder / f"{rank}.err").open("wb") as err:
        os.dup2(err.fileno(), 2)
    importlib.import_module(module).main(scenario, rank, size, folder)


@contextmanager
def started(scenario, size, folder, module=__name__):
    """The processes; those that are left at the end are killed."""
    found = [
        FORKED.Process(target=become_rank, args=(module, scenario, rank, size, folder))
        for rank in range(size)
    ]
    try:
        for process in found:
            process.start()
        yield found
    finally:
        for process in found:
            process.kill()
            process.join()


def ranks(scenario, size, folder, module=__name__):
    """What each process wrote."""
    with started(scenario, size, folder, module) as processes:
        end = time.monotonic() + SECONDS
        for process in processes:
            process.join(max(1.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
    errors = [(folder / f"{rank}.err").read_text() for rank in range(size)]
    assert codes == [0] * size, "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def problem(network):
    """A model in double precision, data, and the batches of one device."""
    import torch
    from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

    torch.manual_seed(0)
    model = NETWORKS[network]().double()
    side = 32 if network == "resnet18" else 8
    x = torch.randn(SAMPLES, 3, side, side, dtype=torch.float64)
    shape = (SAMPLES, 8, 8) if network == "unet" else (SAMPLES,)
    data = TensorDataset(x, torch.randint(0, 5, shape))
    order = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    return model, data, BatchSampler(order, BATCH, drop_last=False)


def alone(network, epochs=EPOCHS, reduction="mean", accumulate=1, around=None):
    """Losses and the state of one device that does everything."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    model, data, batches = problem(network)
    model = around(model) if around else model
    optimizer = torch.optim.SGD(model.parameters(), RATES[reduction], momentum=0.9)
    losses = []
    for _ in range(epochs):
        for number, (x, y) in enumerate(DataLoader(data, batch_sampler=batches), 1):
            if accumulate > 1 and len(x) < BATCH:
                continue
            loss = cross_entropy(model(x), y, reduction=reduction)
            loss.backward()
            losses.append(loss.item())
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return losses, model.state_dict()


def a_table(rank):
    """The second rank takes three times as long, by its own table."""
    from mucudnn.ir.fleet import StepPoint, StepTable

    each = 3.0 if rank == 1 else 1.0
    points = (
        StepPoint(1, 1 + each, 100),
        StepPoint(BATCH, 1 + BATCH * each, 100 * BATCH),
    )
    return StepTable(f"rank {rank}", points)


def slowed(network, rank):
    """A training whose last rank takes three times as long, as all ranks measure.

    Their clock counts work: a hundredth for a step, and so much for every sample.
    """
    from types import SimpleNamespace

    import torch.distributed as dist

    from mucudnn.torch.distributed import step_times

    factor = 3.0 if rank == dist.get_world_size() - 1 else 1.0
    worked = 0.0

    def work(module, inputs):
        nonlocal worked
        worked += factor * (0.01 + 0.04 * len(inputs[0]))

    step_times.time = SimpleNamespace(perf_counter=lambda: worked)
    return trained(network, rank, table=None, before=work)


def trained(
    network,
    rank,
    *,
    passes=False,
    before=None,
    around=None,
    accumulate=1,
    evaluate=False,
    num_workers=0,
    **settings,
):
    """Two epochs as a user would write them; how far that is from one device."""
    import contextlib

    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    import mucudnn.torch as mt
    from mucudnn.passes.load_balancing import equal_shares

    reduction = settings.get("reduction", "mean")
    model, data, batches = problem(network)
    model = around(model) if around else model
    asked = {"table": a_table(rank), "batch": BATCH, **settings}
    measures = ()
    if before is not None:
        model.register_forward_pre_hook(before)
        measures = cross_entropy, data[:5]
    with mt.distribute(model, *measures, **asked) as work:
        optimizer = torch.optim.SGD(
            work.model.parameters(), RATES[reduction], momentum=0.9
        )
        losses, seen = [], []
        mine = work.batches(batches, keep_up=False)
        loader = DataLoader(data, batch_sampler=mine, num_workers=num_workers)
        for _ in range(EPOCHS):
            for number, (x, y) in enumerate(loader, 1):
                if accumulate > 1 and number == len(loader):
                    continue
                apart = number % accumulate
                with work.model.no_sync() if apart else contextlib.nullcontext():
                    if passes:
                        loss = work.backward(cross_entropy, x, y)
                    else:
                        loss = cross_entropy(work.model(x), y, reduction=reduction)
                        loss.backward()
                if not apart:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(work.mean(loss).item())
                seen.append(len(x))
            if evaluate:
                work.model.eval()
                with torch.no_grad():
                    work.model(data[:5][0])
                work.model.train()
    expected, state = alone(
        network, reduction=reduction, accumulate=accumulate, around=around
    )
    return {
        "losses": max(map(relative, losses, expected)),
        "state": furthest(work.model.module.state_dict(), state),
        "seen": seen,
        "plan": work.plan.samples,
        "passes": [share.passes for share in work.plan.shares],
        "idle_ms": work.plan.idle_ms,
        "idle_equal_ms": equal_shares(work.fleet, BATCH).idle_ms,
    }


def relative(found, expected):
    return abs(found - expected) / abs(expected)


def furthest(found, expected):
    """Between two models, relative to their tensors' size."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - value).abs().max() / (value.abs().max() + 1e-30))
        for name, value in expected.items()
    )


def measured(rank):
    """Each rank by its own clock; the model is as it was."""
    from torch.nn.functional import cross_entropy

    import mucudnn.torch as mt

    model, data, _ = problem("residual")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    work = mt.distribute(model, cross_entropy, data[:5], batch=BATCH)
    after = work.model.module.state_dict()
    return {
        "plan": work.plan.samples,
        "sizes": [len(member.table.points) for member in work.fleet.ranks],
        "most": [member.table.most for member in work.fleet.ranks],
        "changed": [n for n, v in before.items() if not v.equal(after[n])],
        "gradients": [n for n, p in model.named_parameters() if p.grad is not None],
        "training": model.training,
    }


def refused(rank):
    """What ranks that disagree, or models that cannot be, are told."""
    from torch.utils.data import BatchSampler

    import mucudnn.torch as mt

    model, _, _ = problem("plain")
    told = []
    few = BatchSampler(range(13), 12, drop_last=False)
    wrong = (
        {"batch": BATCH + rank},
        {"batch": 1},
        {"batch": BATCH, "batch_norm": "some"},
        {"batch": BATCH, "table": None},
    )
    for asked in wrong:
        try:
            mt.distribute(model, **{"table": a_table(rank), **asked})
        except (ValueError, TypeError) as e:
            told.append(str(e))
    told.append(differing(rank))
    work = mt.distribute(model, table=a_table(rank), batch=BATCH)
    try:
        work.batches(few)
    except ValueError as e:
        told.append(str(e))
    return told


def differing(rank):
    """What ranks are told of which the second differs in one thing."""
    import functools

    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import BatchSampler, RandomSampler

    import mucudnn.torch as mt
    from mucudnn.errors import RankLostError

    def asked(**odd):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.25))
        change = odd.pop("change", None)
        if rank == 1 and change is not None:
            change(model)
        settings = {"batch": BATCH, "table": a_table(rank), **(odd if rank else {})}
        return mt.distribute(model, **settings)

    def narrower(model):
        model[0] = torch.nn.Linear(4, 2)

    def calmer(model):
        model[1].p = 0.5

    def frozen(model):
        model[0].weight.requires_grad_(False)

    def optimized(**odd):
        work = asked()
        settings = {"lr": 0.1, "momentum": 0.9, **(odd if rank else {})}
        optimizer = torch.optim.SGD(work.model.parameters(), **settings)
        work.model(torch.ones(work.samples, 4)).sum().backward()
        optimizer.step()

    def shuffled():
        order = torch.Generator().manual_seed(rank)
        order = RandomSampler(range(48), generator=order)
        next(iter(asked().batches(BatchSampler(order, BATCH, drop_last=False))))

    wrapped = functools.partial(DistributedDataParallel, gradient_as_bucket_view=True)
    tried = {
        "reduction": lambda: asked(reduction="sum"),
        "count": lambda: asked(count=len),
        "wrap": lambda: asked(wrap=wrapped),
        "at_least": lambda: asked(at_least=2),
        "shape": lambda: asked(change=narrower),
        "module": lambda: asked(change=calmer),
        "mode": lambda: asked(change=torch.nn.Module.eval),
        "frozen": lambda: asked(change=frozen),
        "argument": lambda: asked(batch=0),
        "lr": lambda: optimized(lr=0.2),
        "momentum": lambda: optimized(momentum=0.5),
        "sampler": shuffled,
    }
    found = {}
    for name, attempt in tried.items():
        try:
            attempt()
        except (ValueError, RankLostError) as e:
            found[name] = f"{type(e).__name__}: {e}"
    optimized()
    return found


def drifting(rank):
    """The second rank gets slower for an epoch, and is as it was after that.

    Their clock counts work.
    """
    import functools
    import importlib

    import torch
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    import mucudnn.torch as mt
    from mucudnn.ir.fleet import StepPoint, StepTable

    distribute = importlib.import_module("mucudnn.torch.distributed.distribute")
    distribute.StepClock = functools.partial(distribute.StepClock, now=lambda: worked)
    worked = 0.0

    class Slow(torch.nn.Linear):
        each = 0.02

        def forward(self, x):
            nonlocal worked
            worked += self.each * len(x)
            return super().forward(x)

    data = torch.randn(24, 2)
    model = Slow(2, 1)
    table = StepTable("slow", (StepPoint(1, 20.0), StepPoint(BATCH, 20.0 * BATCH)))
    work = mt.distribute(model, batch=BATCH, table=table)
    batches = BatchSampler(SequentialSampler(data), BATCH, drop_last=False)
    loader = DataLoader(data, batch_sampler=work.batches(batches))
    plans = []
    for factor in (1, 1, 5, 5, 1, 1):
        model.each = 0.02 * (factor if rank == 1 else 1)
        for x in loader:
            work.model(x).mean().backward()
        plans.append(work.plan.samples)
    return plans


def dying(rank, folder, *, die_at=None, inside=False):
    """A training that is written down after every step, and goes on from there."""
    import signal

    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    import mucudnn.torch as mt

    model, data, batches = problem("residual")
    optimizer = torch.optim.SGD(model.parameters(), RATES["mean"], momentum=0.9)
    file, losses = folder / "checkpoint.pt", []
    if file.exists():
        kept = torch.load(file)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        losses = kept["losses"]
    epoch, skip = divmod(len(losses), len(batches))
    for _ in range(epoch):
        list(batches)  # what was drawn before
    with mt.distribute(model, batch=BATCH, table=a_table(rank)) as work:
        loader = DataLoader(data, batch_sampler=work.batches(batches, skip=skip))
        for _ in range(epoch, EPOCHS):
            for x, y in loader:
                if rank == 1 and len(losses) == die_at:
                    if not inside:
                        os.kill(os.getpid(), signal.SIGKILL)
                    model[-1].weight.register_hook(
                        lambda _: os.kill(os.getpid(), signal.SIGKILL)
                    )
                optimizer.zero_grad()
                loss = cross_entropy(work.model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(work.mean(loss).item())
                if rank == 0:
                    kept = {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "losses": losses,
                    }
                    torch.save(kept, folder / "draft.pt")
                    (folder / "draft.pt").rename(file)
    expected, state = alone("residual")
    return {
        "losses": max(map(relative, losses, expected)),
        "steps": len(losses),
        "state": furthest(model.state_dict(), state),
    }


def conventions(rank):
    """What users of DistributedDataParallel do beside the plain loop, each trained."""
    import functools

    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Unused(torch.nn.Module):
        """Every second step leaves a layer out; one is never used."""

        def __init__(self, model):
            super().__init__()
            self.model, self.steps = model, 0
            self.never = torch.nn.Linear(2, 2).double()
            self.some = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            self.steps += self.training
            y = self.model(x)
            return y * self.some if self.steps % 2 else y

    def wrapped(**settings):
        return {"wrap": functools.partial(DistributedDataParallel, **settings)}

    return {
        "views": trained("residual", rank, **wrapped(gradient_as_bucket_view=True)),
        "static": trained("residual", rank, **wrapped(static_graph=True)),
        "buckets": trained("residual", rank, **wrapped(bucket_cap_mb=0.001)),
        "unused": trained(
            "residual", rank, around=Unused, **wrapped(find_unused_parameters=True)
        ),
        "accumulated": trained("residual", rank, accumulate=2),
        "evaluated": trained("residual", rank, evaluate=True),
        "workers": trained("plain", rank, num_workers=1),
    }


def compiled(rank):
    """Models that are wrapped and compiled beside eager mode, and what steps refuse."""
    import functools
    import warnings

    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import mucudnn.torch as mt
    from mucudnn.errors import PlanningError, UnsupportedError

    nn = torch.nn
    pointwise = nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.GELU()

    class Wide(nn.Module):
        """Blocks of one MiB of parameters each: gradient buckets end between them."""

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(256, 512), *pointwise, nn.Linear(512, 256))
                for _ in range(3)
            )

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    spread = functools.partial(DistributedDataParallel, bucket_cap_mb=1)

    def sharded(model):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def trained(around):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = around(Wide())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(rank)
        losses = []
        for _ in range(2):
            x = torch.randn(512, 256)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        last = [p.detach().double().sum() for p in model.parameters()]
        return losses, [float(getattr(p, "full_tensor", lambda p=p: p)()) for p in last]

    free = mt.backend(cache=None)
    compile_free = functools.partial(torch.compile, backend=free)
    found = {
        "eager": trained(spread),
        "around": trained(lambda model: compile_free(spread(model))),
    }
    peaks = [plan.peak_bytes for plan in free.plans]
    tight = mt.backend(cache=None, budget=int(0.8 * free.peak_bytes))
    compile_tight = functools.partial(torch.compile, backend=tight)
    found["inside"] = trained(lambda model: spread(compile_tight(model)))
    kept = [tight.peak_bytes, int(0.8 * free.peak_bytes), len(tight.plans)]
    found["sharded"] = trained(sharded)
    found["sharded, compiled"] = trained(lambda model: compile_free(sharded(model)))
    torch._dynamo.reset()
    small = mt.backend(cache=None, budget="6MiB")
    loss_fn, told = torch.nn.functional.mse_loss, []
    x = torch.randn(512, 256)

    def adamw(model):
        return torch.optim.AdamW(model.parameters())

    for ask in (
        lambda: torch.compile(spread(Wide()), backend=small)(x).sum().backward(),
        lambda: mt.memory(model := sharded(Wide()), loss_fn, (x, x), adamw(model)),
    ):
        try:
            ask()
        except (UnsupportedError, PlanningError) as e:
            told.append(f"{type(e).__name__}: {e}")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mt.train_step(model := Wide(), loss_fn, adamw(model), cache=None)
    return {
        "found": found,
        "peaks": peaks,
        "kept": kept,
        "told": told,
        "warned": [str(w.message) for w in seen],
    }


def layers(rank):
    """Sharded layers, eager and compiled one by one under a budget for all."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import mucudnn.torch as mt
    from bench.torch.peak import real_peak
    from mucudnn.torch.costs.meters import CpuMeter, Links

    # Recompute instead: PyTorch's profiler does not see what a copying thread frees.
    CpuMeter.links = lambda meter, step: Links(1.0, 1.0)
    nn = torch.nn

    class Block(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

        def forward(self, x):
            return x + super().forward(x)

    def trained(budget):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        planned = budget and mt.compile_layers(model, budget=budget, cache=None)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(rank)
        losses = []

        def step():
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())

        for look in (False, True):
            x = torch.randn(512, 64)
            optimizer.zero_grad()
            peak = real_peak(step) if look else step()
            optimizer.step()
        shards = sum(p.to_local().nbytes for p in model.parameters())
        # The batch is the caller's; the loss and what it reads are behind the layers.
        peak += shards - 3 * x.nbytes
        sums = [float(p.full_tensor().double().sum()) for p in model.parameters()]
        return losses, sums, peak, planned.peak_bytes if planned else 0

    eager = trained(None)
    budget = int(0.7 * eager[2])
    x = torch.empty(512, 64, device="meta")
    model = nn.Sequential(*(Block() for _ in range(4))).to("meta")
    size = torch.distributed.get_world_size()
    forecast = mt.memory(
        *(model, lambda y, _: y.square().mean(), (x, x)),
        torch.optim.SGD(model.parameters(), 0.1),
        device="h100",
        mesh=(size,),
    )
    return {
        "eager": eager,
        "planned": trained(budget),
        "budget": budget,
        "forecast": forecast.unlimited_bytes - 2 * x.nbytes,
    }


def everything(rank):
    """Several trainings in one group: starting one takes longer than they do."""
    return {
        "residual": trained("residual", rank),
        "unet": trained("unet", rank),
        "sum": trained("residual", rank, reduction="sum"),
        "passes": trained("plain", rank, passes=True, memory=150 if rank else None),
        "measured": measured(rank),
        "refused": refused(rank),
    }


SCENARIOS = {
    "everything": lambda rank, folder: everything(rank),
    "compiled": lambda rank, folder: compiled(rank),
    "layers": lambda rank, folder: layers(rank),
    "conventions": lambda rank, folder: conventions(rank),
    "killed-inside": lambda rank, folder: dying(rank, folder, die_at=4, inside=True),
    "residual": lambda rank, folder: trained("residual", rank),
    "drifting": lambda rank, folder: drifting(rank),
    "killed": lambda rank, folder: dying(rank, folder, die_at=4),
    "resumed": dying,
    "slowed": lambda rank, folder: [
        slowed(name, rank) for name in ("residual", "unet")
    ],
    "slowed-resnet18": lambda rank, folder: [slowed("resnet18", rank)],
}


def main(scenario, rank, size, folder):
    import torch

    torch.set_num_threads(1)

    def work():
        result = SCENARIOS[scenario](rank, folder)
        (folder / f"{rank}.json").write_text(json.dumps(result))

    run_rank(folder / f"store-{scenario}-{size}", rank, size, work)
