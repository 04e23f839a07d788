"""One of two ranks that train over the stand-in: `python -m tests.fakecuda.ranks`."""

import json
import sys

import torch
from torch import distributed as dist, nn

import mucudnn.torch as mt
from mucudnn.torch.distributed.step_ranks import StepRanks
from tests.fakecuda.device import counted


def main(rank, store):
    """Print the calls that measuring the collectives and a steady step make."""
    dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=2)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    batch = torch.rand(8, 64).cuda(), torch.zeros(8, dtype=torch.long).cuda()
    ranked = nn.parallel.DistributedDataParallel(model)
    own = torch.optim.SGD(ranked.parameters(), 0.1)
    step = mt.train_step(ranked, nn.functional.cross_entropy, own, cache=None)
    measure = StepRanks.measure

    def watched(*args):
        with counted() as found:
            measure(*args)
        sys.stdout.write(json.dumps(found) + "\n")

    StepRanks.measure = watched
    for _ in range(2):
        step(*batch)
    with counted() as found:
        step(*batch)
    nodes = step.plan.plan.schedule.graph.nodes
    sums = sum("all_reduce" in node.op for node in nodes)
    sys.stdout.write(json.dumps(found | {"sums": sums}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
