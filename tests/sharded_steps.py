"""Ranks that train one model by `train_step`, beside PyTorch's own FSDP2 or DDP."""

import copy
import json
import os
import signal
import threading
import time
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import config
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mucudnn.torch as mt
from bench.torch.peak import real_peak
from mucudnn.passes.scheduling.collectives import under_way
from mucudnn.torch.distributed.sharding import WAIT, finished, started
from tests.fleet_ranks import run_rank

BATCH, STEPS = 64, 3


class Block(nn.Module):
    """Two layers behind a normalization, of sizes that ranks cannot divide evenly."""

    def __init__(self, width=22):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def layered():
    return nn.Sequential(nn.Linear(6, 22), Block(), Block(), nn.Linear(22, 3))


def wide():
    """With matrices that are gathered by calls of their own."""
    blocks = (Block(530) for _ in range(3))
    return nn.Sequential(nn.Linear(6, 530), *blocks, nn.Linear(530, 3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 22, bias=False)
        self.block = Block()
        self.back = nn.Linear(6, 22, bias=False)
        self.back.weight = self.embed.weight

    def forward(self, x):
        return (self.block(self.embed(x)) @ self.back.weight)[:, :3]


class Partly(nn.Module):
    """Has a parameter that no output depends on, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.layers = layered()
        self.unused = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    def forward(self, x):
        return self.layers(x) * self.scale


class Skipping(nn.Module):
    """Uses inputs of blocks, which have several gradients in them, beside them."""

    def __init__(self):
        super().__init__()
        self.begin, self.block, self.last = nn.Linear(6, 22), Block(), Block()
        self.end = nn.Linear(22, 3)

    def forward(self, x):
        x = self.begin(x)
        y = self.block(x)
        z = self.block(y + x)
        return self.end(self.last(z) + self.last(y) + x)


def normalized():
    return nn.Sequential(
        nn.Linear(6, 22), nn.BatchNorm1d(22), nn.ReLU(), nn.Dropout(0.3), Block(),
        nn.Linear(22, 3),
    )  # fmt: skip


def sharded(model, **options):
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def low_precision(model):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    return sharded(model, mp_policy=policy)


def half(model):
    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))


def inner_only(model):
    """Blocks are sharded by themselves; what is between them belongs to every rank."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    return model


def finding_unused(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def mse(result, target):
    return nn.functional.mse_loss(result.float(), target)


CASES = {
    "fsdp": (layered, sharded, adamw, {}),
    "wide": (wide, sharded, adamw, {"budget": "80%"}),
    "tight": (layered, sharded, adamw, {"budget": "75%"}),
    "tied": (Tied, sharded, adamw, {}),
    "skipping": (Skipping, sharded, momentum, {}),
    "partly": (Partly, sharded, momentum, {}),
    "normalized": (normalized, sharded, adamw, {}),
    "bfloat16": (layered, low_precision, adamw, {}),
    "float16": (layered, half, momentum, {}),
    "inner only": (layered, inner_only, adamw, {}),
    "clipped": (layered, sharded, adamw, {"clip_norm": 0.5}),
    "ddp": (layered, DistributedDataParallel, adamw, {"budget": "90%"}),
    "ddp clipped": (layered, DistributedDataParallel, momentum, {"clip_norm": 0.5}),
    "ddp normalized": (
        normalized,
        DistributedDataParallel,
        adamw,
        {"budget": "80%", "offload_state": True},
    ),
    "ddp unused": (Partly, finding_unused, adamw, {}),
}


def own(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()


def difference(one, other):
    """The first parameter, buffer or state of two trainings that is not equal."""
    for kind in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(one[0], kind)(), getattr(other[0], kind)(), strict=True)
        for (name, a), (_, b) in pairs:
            if type(a) is not type(b) or not torch.equal(own(a), own(b)):
                return name
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        for key, value in one[1].state.get(p, {}).items():
            mine = other[1].state[q][key]
            if type(value) is not type(mine) or not torch.equal(own(value), own(mine)):
                return key
    return ""


def trainings(case):
    """The same model and optimizer twice, and the options of a step."""
    made, wrap, optimizer, options = CASES[case]
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = wrap(made())
        found.append((model, optimizer(model.parameters())))
    return *found, options


def batch(size=BATCH):
    return torch.randn(size, 6), torch.randn(size, 3)


def eager(model, optimizer, x, y, clip=None):
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    if clip is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        del norm
    optimizer.step()
    return loss.detach()


def compared(case):
    """Train both ways; what differs first, and the peaks of the planned one."""
    theirs, ours, options = trainings(case)
    step = mt.train_step(ours[0], mse, ours[1], cache=None, **options)
    torch.manual_seed(100 + dist.get_rank())
    differs = []
    for _ in range(STEPS):
        x, y = batch()
        state = torch.get_rng_state()
        wanted = eager(*theirs, x, y, options.get("clip_norm"))
        torch.set_rng_state(state)
        loss = step(x, y)
        differs.append("" if torch.equal(loss, wanted) else "loss")
        differs.append(difference(theirs, ours))
    plan = step.plan
    room = plan.peak_bytes - plan.resident_bytes
    # A free by a thread of gloo may go unseen, which only adds to a peak.
    return {
        "differs": differs,
        "real": min(real_peak(lambda: step(*batch())) for _ in range(3)),
        "planned": room,
        "budget": None if plan.budget == float("inf") else plan.budget,
        "peak": plan.peak_bytes,
        "beside": nodes_beside(plan.plan.schedule.graph),
    }


def nodes_beside(graph):
    """The most nodes that run between the start of a collective and its wait."""
    spans = (pair for pairs in under_way(graph).values() for pair in pairs)
    return max(wait - start - 1 for start, wait in spans)


def apart():
    """Collectives that rank 0 has begun before rank 1 begins its own."""
    group, rank = dist.group.WORLD.group_name, dist.get_rank()
    operand = torch.arange(8.0) * (rank + 1)
    differs = []
    for name, arguments in (
        ("all_gather_into_tensor", (2, group)),
        ("reduce_scatter_tensor", ("sum", 2, group)),
        ("all_reduce", ("avg", group)),
    ):
        function = getattr(torch.ops._c10d_functional, name).default
        wanted = WAIT(function(operand, *arguments))
        begun = torch.zeros(1)
        if rank == 1:
            dist.recv(begun, 0)
        result = started(function)(operand.clone(), *arguments)
        if rank == 0:
            dist.send(begun, 1)
        differs.append("" if torch.equal(finished(result), wanted) else name)
    return differs


def between():
    """Eager forward passes, a checkpoint and a schedule between planned steps."""
    theirs, ours, _ = trainings("fsdp")
    step = mt.train_step(ours[0], mse, ours[1], cache=None)
    rates = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for _, o in (theirs, ours)]
    torch.manual_seed(100 + dist.get_rank())
    differs, kept = [], None
    for i in range(4):
        x, y = batch()
        eager(*theirs, x, y)
        step(x, y)
        for rate in rates:
            rate.step()
        differs.append(difference(theirs, ours))
        if i in (0, 3):  # FSDP2 does not take state behind an evaluation
            with torch.no_grad():
                evaluated = [model(x) for model, _ in (theirs, ours)]
            differs.append("" if torch.equal(*evaluated) else "evaluation")
        if i == 1:
            kept = [copy.deepcopy(get_state_dict(*pair)) for pair in (theirs, ours)]
        if i == 2:
            for pair, state in zip((theirs, ours), kept, strict=True):
                set_state_dict(
                    *pair, model_state_dict=state[0], optim_state_dict=state[1]
                )
            differs.append(difference(theirs, ours))
    return differs


def accumulated():
    """Batches in two parts, as two backward passes before an update."""
    theirs, ours, _ = trainings("fsdp")
    step = mt.train_step(ours[0], mse, ours[1], cache=None, accumulate=2)
    torch.manual_seed(100 + dist.get_rank())
    x, y = batch()
    for rows in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
        (mse(theirs[0](x[rows]), y[rows]) / 2).backward()
    theirs[1].step()
    step(x, y)
    return difference(theirs, ours)


def scaled():
    """Losses scaled for float16; the gradients of one rank are once not finite."""
    differs = []
    for case in ("fsdp", "ddp"):
        theirs, ours, _ = trainings(case)
        scalers = [
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
            for _ in range(2)
        ]
        parts = ours[0], mse, ours[1]
        step = mt.train_step(*parts, cache=None, scaler=scalers[1])
        torch.manual_seed(100 + dist.get_rank())
        for i in range(4):
            x, y = batch()
            if i == 2 and dist.get_rank() == 1:
                x[0, 0] = float("inf")
            theirs[1].zero_grad()
            scalers[0].scale(mse(theirs[0](x), y)).backward()
            scalers[0].step(theirs[1])
            scalers[0].update()
            step(x, y)
            differs.append(difference(theirs, ours))
            now = [scaler.get_scale() for scaler in scalers]
            differs.append("" if now[0] == now[1] else f"scales {now}")
    return differs


def compiled():
    """Kernels of Inductor, beside `torch.compile` of the whole model on every rank."""
    found = []
    for made, wrap, options in (
        (layered, sharded, {"budget": "90%", "accumulate": 2}),
        (normalized, DistributedDataParallel, {}),
        (Conv, DistributedDataParallel, {}),
        (Partly, finding_unused, {}),
    ):
        torch._dynamo.reset()
        torch.manual_seed(0)
        whole, mine = made(), wrap(made())
        theirs = whole, momentum(whole.parameters())
        whole.load_state_dict(full(mine))
        parts = mine, mse, momentum(mine.parameters())
        step = mt.train_step(*parts, cache=None, inductor=True, **options)
        loss_of = torch.compile(lambda x, y, model=whole: mse(model(x), y))
        torch.manual_seed(100 + dist.get_rank())
        count = options.get("accumulate", 1)
        for _ in range(2):
            x, y = batch()
            state = torch.get_rng_state()
            if wrap is DistributedDataParallel:
                for buffer in whole.buffers():
                    dist.broadcast(buffer, 0)
            summed = {}
            for rows in zip(x.chunk(count), y.chunk(count), strict=True):
                whole.zero_grad()
                (loss_of(*rows) / count).backward()
                for parameter in whole.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
                        before = summed.get(parameter, 0.0)
                        summed[parameter] = before + parameter.grad
            for parameter, gradient in summed.items():
                parameter.grad = gradient
            theirs[1].step()
            torch.set_rng_state(state)
            step(x, y)
        names = whole.state_dict()
        now = full(mine)
        found += [f"{n} {made}" for n in names if not torch.equal(names[n], now[n])]
        if not step.plan.kernels:
            found.append(f"{made} is not compiled")
        room = step.plan.peak_bytes - step.plan.resident_bytes
        if min(real_peak(lambda step=step: step(*batch())) for _ in range(3)) > room:
            found.append(f"{made} takes more than planned")
    mine = sharded(layered())
    parts = mine, mse, momentum(mine.parameters())
    step = mt.train_step(*parts, cache=None, inductor=True)
    missing = {"cpp.cxx": ("no-such-compiler",)} if dist.get_rank() else {}
    with config.patch(missing), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step(*batch())
    words = "install g++" if dist.get_rank() else "another rank cannot compile it"
    if not any(words in str(w.message) for w in warned) or step.plan.kernels:
        found.append("one rank has no compiler")
    return found


def full(model):
    """The state of a model with whole tensors, and without prefixes."""
    return {
        name.removeprefix("module."): (
            value.full_tensor() if hasattr(value, "full_tensor") else value
        )
        for name, value in model.state_dict().items()
    }


class Conv(nn.Module):
    """Has gradients that Inductor stores channels last."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3, bias=False)
        self.end = nn.Linear(8 * 2 * 2, 3)

    def forward(self, x):
        x = x.repeat(1, 6).view(-1, 1, 6, 6)
        x = nn.functional.relu(self.second(self.first(x)))
        return self.end(x.flatten(1))


def own_sum(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's own way to sum gradients."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def message_of(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as e:
            return f"{type(e).__name__}: {e}"
    return ""


def refused():
    """Errors, which every rank gets and is alive after."""
    rank = dist.get_rank()

    def step(wrap=sharded, optimizer=adamw, model=layered, **options):
        wrapped = wrap(model())
        parts = wrapped, mse, optimizer(wrapped.parameters())
        return mt.train_step(*parts, cache=None, **options)

    def adafactor(parameters):
        return torch.optim.Adafactor(parameters)

    def offloaded(model):
        from torch.distributed.fsdp import CPUOffloadPolicy

        return sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))

    def gathered(model):
        model = sharded(model)
        model.set_reshard_after_backward(False)
        return model

    def gathering(model):
        model = sharded(model)
        model.set_custom_all_gather(own_sum)
        return model

    def hooked(model):
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, own_sum)
        return model

    x, y = batch()
    uneven = batch(BATCH + rank)
    fits = step()
    first = fits(x, y)
    found = {
        "budget": message_of(lambda: step(budget="20KiB")(x, y)),
        "settings": message_of(lambda: step(clip_norm=1.0 + rank)(x, y)),
        "batch": message_of(lambda: fits(*uneven)),
        "optimizer": message_of(lambda: step(optimizer=adafactor)(x, y)),
        "split": message_of(lambda: step(split="auto")),
        "state": message_of(lambda: step(offload_state=True)),
        "verify": message_of(lambda: step(verify=1)),
        "offload": message_of(lambda: step(wrap=offloaded)),
        "gathered": message_of(lambda: step(wrap=gathered)),
        "gathering": message_of(lambda: step(wrap=gathering)),
        "hook": message_of(lambda: step(wrap=hooked)),
        "one rank": message_of(lambda: step(model=failing)(x, y)),
    }
    # After all of these, the ranks still train together.
    found["after"] = message_of(lambda: fits(x, y))
    found["loss"] = float(first)
    return found


class Failing(nn.Module):
    """Fails on rank 1."""

    def __init__(self):
        super().__init__()
        self.layers = layered()

    def forward(self, x):
        if dist.get_rank() == 1:
            raise ArithmeticError("only here")
        return self.layers(x)


def failing():
    return Failing()


def killed(folder):
    """Train until another rank kills itself in mid-step; how this one ends."""
    _, (model, optimizer), _ = trainings("fsdp")
    step = mt.train_step(model, mse, optimizer, cache=None)
    x, y = batch()
    step(x, y)
    (folder / f"ready{dist.get_rank()}").touch()
    began = time.monotonic()
    if dist.get_rank() == 1:
        while not (folder / "ready0").exists():
            time.sleep(0.01)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    message = message_of(lambda: [step(x, y) for _ in range(100_000)])
    (folder / "0.json").write_text(
        json.dumps({"message": message, "seconds": time.monotonic() - began})
    )
    os._exit(0)


FEATURES = {
    function.__name__: function
    for function in (apart, between, accumulated, scaled, compiled, refused)
}


def main(cases, rank, size, folder):
    torch.set_num_threads(1)
    found = {}

    def work():
        if cases == "killed":
            killed(folder)
        for name in cases.split(","):
            if name in FEATURES:
                found[name] = FEATURES[name]()
            else:
                try:
                    found[name] = compared(name)
                except Exception:
                    found[name] = {"error": traceback.format_exc()}
        (folder / f"{rank}.json").write_text(json.dumps(found))

    run_rank(folder / "store", rank, size, work)
