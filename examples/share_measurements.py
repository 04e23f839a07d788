"""Record measurements on one machine, and plan with them on another."""

import tempfile
from pathlib import Path

from mucudnn import BenchmarkCache, ConvProblem, Direction, Tuner

problem = ConvProblem(
    direction=Direction.BACKWARD_FILTER,
    x_shape=(16, 8, 14, 14),
    w_shape=(16, 8, 3, 3),
    padding=1,
)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "measurements.json.gz"
    with BenchmarkCache(Path(folder) / "here.sqlite") as cache:
        here = Tuner(cache=cache)
        (plan,) = here.plan([problem])
        print(f"{cache.export_json(file)} measurements in {file.name}")

    there = Tuner(backend=f"recorded:{file}")
    (replayed,) = there.plan([problem])

measured, recorded = (
    [(step.algo, step.batch) for step in p.steps] for p in (plan, replayed)
)
print("measured:", measured)
print("replayed:", recorded)
if recorded != measured:
    raise SystemExit("the plans differ")
