"""cuDNN's own pooling, norms and softmax against our kernels, on networks' shapes."""

from collections.abc import Mapping
from typing import Any

from bench.gpu.job import Job
from bench.gpu.verdicts import geomean
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.fusion import fuse_elementwise
from mucudnn.runtime.profiling.profiler import signature
from mucudnn.runtime.training.measured_choices import LibraryRace
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["library_kernels"]

_BATCH = 64
_NETWORKS = ("alexnet", "resnet50", "googlenet")


def library_kernels(job: Job) -> Mapping[str, Any]:
    """Milliseconds of both for each distinct node that has two, as a step has them."""
    library = job.backend.library_kernels
    if library is None:
        return {"skipped": "no library computes what our kernels do"}
    race = LibraryRace(Tuner(backend=job.backend, cache=None))
    rows: list[dict[str, Any]] = []
    seen = set()
    for name in _NETWORKS:
        graph = training_graph(fuse_elementwise(get_model(name)(job.batch or _BATCH)))
        for node in graph.nodes:
            key = signature(graph, node)
            if key in seen or not library.offers(graph, node) or job.left_s < 1:
                continue
            seen.add(key)
            times = race.times(graph, node)
            if times is not None:
                row = {"network": name, "node": node.name, "op": node.op}
                refused = not library.offers(graph, node)
                rows.append({**row, "times_ms": times, "refused": refused})
    ratios = [r["times_ms"][1] / r["times_ms"][0] for r in rows if not r["refused"]]
    mean = geomean(ratios)
    said = "nothing ran" if mean is None else f"{library.name} / ours: mean {mean:.3f}"
    return {"rows": rows, "text": said}
