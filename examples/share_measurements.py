"""Measure here, plan elsewhere: the recording answers in place of the machine."""

import tempfile
from pathlib import Path

from mucudnn import ConvProblem, Direction, Tuner
from mucudnn.runtime.cache import BenchmarkCache
from mucudnn.runtime.tuner import LAUNCH_OVERHEAD_MS

problem = ConvProblem(
    direction=Direction.BACKWARD_FILTER,
    x_shape=(16, 8, 14, 14),
    w_shape=(16, 8, 3, 3),
    padding=1,
)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "measurements.json.gz"
    with BenchmarkCache(Path(folder) / "here.sqlite") as cache:
        here = Tuner(cache=cache, validate=False)
        (plan,) = here.plan([problem])
        print(f"{cache.export_json(file)} measurements in {file.name}")

    there = Tuner(backend=f"recorded:{file}", validate=False)
    (replayed,) = there.plan([problem])

measured, recorded = (
    [(step.algo, step.batch) for step in p.steps] for p in (plan, replayed)
)
print("measured:", measured)
print("replayed:", recorded)
# The tuner here allows for the noise of its measurements; a replay has none. So it may
# take another plan, but by the recorded medians never one that costs more.
costs = [p.time_ms + LAUNCH_OVERHEAD_MS * len(p.steps) for p in (plan, replayed)]
if costs[1] > costs[0] + 1e-9:
    raise SystemExit(f"the replayed plan costs {costs[1]} ms instead of {costs[0]}")
