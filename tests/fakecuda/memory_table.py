"""Print planned, requested and reserved bytes of steps over the stand-in.

    python -m tests.fakecuda.memory_table [MODEL ...]

Each model is planned at three budgets: its least, its most, and between. Convolutions
are PyTorch's own kernels, as the stand-in has no engines of cuDNN.
"""

import functools
import gc
import sys
import tempfile
import warnings

import torch
from torch import nn

import mucudnn.torch as mt
from bench.step_torch import NETWORKS
from bench.torch.zoo import GPTConfig, gpt, unet
from mucudnn.errors import PlanningError
from tests.fakecuda.device import counted

MIB = 1 << 20


def of_tokens(batch, *config):
    def made():
        with torch.device("meta"):
            found = gpt(batch, GPTConfig(*config, 0.0))
        tokens = torch.zeros(found.batch[0].shape, dtype=torch.long, device="cuda")
        model = found.model.to_empty(device="cuda")
        return model, found.loss_fn, (tokens, tokens.clone()), torch.optim.AdamW

    return made


def of_images(name, batch):
    def made():
        images = torch.zeros(batch, 3, 224, 224, device="cuda")
        labels = torch.zeros(batch, dtype=torch.long, device="cuda")
        model = NETWORKS[name]().train().cuda()
        return model, nn.functional.cross_entropy, (images, labels), momentum

    return made


def segmented():
    found = unet(8, 128, 32)
    batch = tuple(tensor.cuda() for tensor in found.batch)
    return found.model.cuda(), found.loss_fn, batch, momentum


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


MODELS = {
    "GPT, 4 layers, width 256, N=16": of_tokens(16, 4, 256, 4, 256, 4096),
    "GPT, 6 layers, width 512, N=16": of_tokens(16, 6, 512, 8, 512, 8192),
    "GPT-2 124M, N=8": of_tokens(8, 12, 768, 12, 1024, 50257),
    "ResNet-18, N=64": of_images("resnet18", 64),
    "ResNet-50, N=64": of_images("resnet50", 64),
    "U-Net, 128x128, N=8": segmented,
}


def rows(name, cache):
    """Return a row for each budget: MiB, and calls of a step beside eager mode's."""
    model, loss, batch, optimizer = MODELS[name]()
    own = optimizer(model.parameters())
    eager = calls_of(functools.partial(eager_step, model, loss, batch, own))
    plans = functools.partial(mt.train_step, model, loss, own, cache=cache)
    try:
        plans(budget="1KiB").prepare(*batch)
    except PlanningError as e:
        least = e.least_bytes
    most = plans().prepare(*batch).peak_bytes
    for share in (0.0, 0.4, 1.0):
        gc.collect()
        step = plans(budget=int(least + share * (most - least)))
        calls = calls_of(functools.partial(step, *batch))
        stats, plan = torch.cuda.memory_stats(), step.plan
        held = plan.given_bytes
        planned = plan.peak_bytes + held
        requested, reserved = (
            stats[f"{kind}_bytes.all.peak"] for kind in ("requested", "reserved")
        )
        gaps = plan.fragmentation_bytes
        figures = plan.budget + held, planned, gaps, requested, reserved
        words = [f"{figure / MIB:,.0f}" for figure in figures]
        ratio = f"{reserved / (planned + gaps):.3f}"
        yield [name, *words, ratio, *map(str, (*calls, *eager))]
        del step


def eager_step(model, loss, batch, optimizer):
    x, *others = batch
    loss(model(x), *others).backward()
    optimizer.step()
    optimizer.zero_grad()


def calls_of(run):
    """Return launches, copies that left, and waits of the host in a steady step."""
    run(), run()
    with counted() as calls:
        run()
    waits = sum(calls[f"{kind}_sync"] for kind in ("stream", "event", "device", "copy"))
    return calls["launch"] + calls["product"], waits


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    head = "model", "budget", "planned", "gaps", "requested", "reserved"
    more = "reserved / (planned + gaps)", "launches", "waits"
    more += "launches, eager", "waits, eager"
    print("|", " | ".join((*head, *more)), "|")  # noqa: T201
    print("| --- |", " --: |" * 10)  # noqa: T201
    with tempfile.TemporaryDirectory() as cache:
        for name in sys.argv[1:] or MODELS:
            torch._C._cuda_clearCublasWorkspaces()
            gc.collect()
            torch.cuda.empty_cache()
            for row in rows(name, cache):
                print("|", " | ".join(row), "|", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
