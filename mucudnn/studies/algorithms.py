"""List algorithms and those that fit a limit, without measuring.

A library reports its algorithms and their workspaces without running them; if it can do
so from a description of a device, no device is needed. Algorithms are in the library's
order of preference: the first is its own choice. Algorithms whose arithmetic is not
accepted are only counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mucudnn.backends import Backend
from mucudnn.codecs import encode_fields
from mucudnn.errors import BackendUnavailableError, MucudnnError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.numerics import Numerics, RowStatus
from mucudnn.notebook import html_of
from mucudnn.passes.microbatch import BatchPolicy, aligned_batches, candidate_batches
from mucudnn.passes.registry import name_of
from mucudnn.studies.convolutions import LayerProgress, StudyInterrupted, study_layers
from mucudnn.suites import Layer

_ANYTHING = "*"
"""Stands for every algorithm if the library fails to list any."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Properties of an algorithm at one micro-batch size."""

    algo: str
    workspace: int
    math_mode: str
    deterministic: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WithinLimit:
    """Algorithms that fit a limit: their number, and the highest ranked one."""

    algorithms: int
    first_choice_fits: bool
    best: Algorithm | None


@dataclass(frozen=True, slots=True)
class SurveyedBatch:
    """Accepted algorithms at one micro-batch size, by the library's preference.

    `failures` are (algorithm, reason) of the others.
    """

    batch: int
    algorithms: tuple[Algorithm, ...]
    failures: tuple[tuple[str, str], ...] = ()

    @property
    def refused(self) -> int:
        """Number of algorithms that can run but are not accepted."""
        return sum(
            RowStatus.of(reason) is RowStatus.REFUSED for _, reason in self.failures
        )

    @property
    def first_choice(self) -> Algorithm | None:
        """The library's own choice, if any."""
        return self.algorithms[0] if self.algorithms else None

    @property
    def least_workspace(self) -> int | None:
        """Bytes of the smallest workspace, if any."""
        return min((a.workspace for a in self.algorithms), default=None)

    @property
    def greatest_workspace(self) -> int | None:
        """Bytes of the largest workspace, if any."""
        return max((a.workspace for a in self.algorithms), default=None)

    def within(self, limit: int) -> WithinLimit:
        """Return the algorithms that fit `limit` bytes."""
        fitting = [a for a in self.algorithms if a.workspace <= limit]
        best = fitting[0] if fitting else None
        return WithinLimit(
            len(fitting), best is not None and best is self.algorithms[0], best
        )

    def to_json(self, limits: Sequence[int]) -> dict[str, Any]:
        """Return plain values; see `AlgorithmSurvey.to_json`."""
        first = self.first_choice
        return {
            "batch": self.batch,
            "algorithms": len(self.algorithms),
            "refused": self.refused,
            "least_workspace": self.least_workspace,
            "greatest_workspace": self.greatest_workspace,
            "first_choice": first and asdict(first),
            "fits": {str(limit): asdict(self.within(limit)) for limit in limits},
            "all": [asdict(algorithm) for algorithm in self.algorithms],
            "failures": [{"algo": a, "reason": why} for a, why in self.failures],
        }


@dataclass(frozen=True, slots=True)
class SurveyedLayer:
    """One direction of a layer; `batches` ascend up to the whole mini-batch."""

    name: str
    problem: ConvProblem
    batches: tuple[SurveyedBatch, ...]

    @property
    def direction(self) -> Direction:
        """Direction of the layer's problem."""
        return self.problem.direction

    def largest_batch(self, limit: int) -> int | None:
        """Return the largest micro-batch at which the first choice fits."""
        sizes = [b.batch for b in self.batches if b.within(limit).first_choice_fits]
        return max(sizes, default=None)

    def to_json(self, limits: Sequence[int]) -> dict[str, Any]:
        """Return plain values; see `AlgorithmSurvey.to_json`."""
        return {
            "name": self.name,
            "direction": self.direction.value,
            "problem": encode_fields(self.problem),
            "largest_batch": {str(n): self.largest_batch(n) for n in limits},
            "batches": [b.to_json(limits) for b in self.batches],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSurvey:
    """Algorithms of every layer, micro-batch size and limit.

    Of `asked` layers, `layers` are done.
    """

    backend: str
    fingerprint: str
    batch_policy: str
    numerics: str
    limits: tuple[int, ...]
    layers: tuple[SurveyedLayer, ...]
    asked: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `json.dumps(…, allow_nan=False)` accepts.

        An algorithm is written `{"algo": …, "workspace": bytes, "math_mode": …,
        "deterministic": bool, "notes": […]}`, abbreviated `{…}` here; keys of `fits`
        and `largest_batch` are limits in bytes; missing values are null::

            {"schema": 1, "backend": …, "fingerprint": …, "batch_policy": …,
             "numerics": "tf32", "limits": [67108864], "interrupted": false,
             "layers": [
              {"name": …, "direction": "forward", "problem": {"x_shape": […], …},
               "largest_batch": {"67108864": 32},
               "batches": [
                {"batch": 1, "algorithms": 34, "refused": 5,
                 "least_workspace": 0, "greatest_workspace": 123456,
                 "first_choice": {…},
                 "fits": {"67108864": {"algorithms": 29, "first_choice_fits": true,
                                       "best": {…}}},
                 "all": [{…}, …],
                 "failures": [{"algo": …, "reason": …}, …]}]}]}
        """
        return {
            "schema": 1,
            "backend": self.backend,
            "fingerprint": self.fingerprint,
            "batch_policy": self.batch_policy,
            "numerics": self.numerics,
            "limits": list(self.limits),
            "interrupted": len(self.layers) < self.asked,
            "layers": [layer.to_json(self.limits) for layer in self.layers],
        }

    _repr_html_ = html_of


def survey_algorithms(
    backend: Backend,
    layers: Sequence[Layer],
    policy: BatchPolicy,
    limits: Sequence[int],
    *,
    numerics: Numerics | None = None,
    progress: Callable[[LayerProgress[SurveyedLayer]], None] | None = None,
) -> AlgorithmSurvey:
    """List the library's algorithms at every micro-batch size of a policy.

    The sizes are those that a tuner would measure on that backend.

    Args:
        backend: Backend to query; it runs nothing.
        layers: Layers, each in the direction of its problem.
        policy: Policy for candidate micro-batch sizes.
        limits: Workspace limits in bytes.
        numerics: Accepted arithmetic; the default policy if not given.
        progress: Called when a layer begins and when it is done.

    Raises:
        StudyInterrupted: Ctrl-C; carries the finished layers.
        BackendUnavailableError: The library is missing.
        ValueError: The policy is unknown.
    """
    accepted = numerics or Numerics()
    # An unknown policy is refused before the first layer.
    candidate_batches(1, policy)
    done: list[SurveyedLayer] = []

    def found() -> AlgorithmSurvey:
        return AlgorithmSurvey(
            backend=backend.name,
            fingerprint=backend.device.fingerprint,
            batch_policy=name_of(policy),
            numerics=accepted.words,
            limits=tuple(dict.fromkeys(limits)),
            layers=tuple(done),
            asked=len(layers),
        )

    def survey(layer: Layer, left: int) -> SurveyedLayer:
        problem = layer.problem
        sizes = candidate_batches(problem.batch, policy)
        aligned = aligned_batches(problem, sizes, backend.split_alignment)
        batches = (_survey_batch(backend, problem, size, accepted) for size in aligned)
        return SurveyedLayer(layer.name, problem, tuple(batches))

    try:
        study_layers(layers, survey, done, progress)
    except KeyboardInterrupt:
        raise StudyInterrupted(found()) from None
    return found()


def _survey_batch(
    backend: Backend, problem: ConvProblem, size: int, numerics: Numerics
) -> SurveyedBatch:
    """List algorithms at one size; a failing library costs this size only."""
    conv, micro = backend.conv, problem.with_batch(size)
    whole = size == problem.batch
    accepted: list[Algorithm] = []
    failures: list[tuple[str, str]] = []
    try:
        for algo, nbytes in conv.algorithms(micro):
            traits = conv.traits(micro, algo)
            if (reason := numerics.refusal(traits, whole=whole)) is not None:
                failures.append((algo, reason))
                continue
            mode, notes = traits.math_mode, traits.notes
            accepted.append(Algorithm(algo, nbytes, mode, traits.deterministic, notes))
        failures += conv.excluded(micro)
    except BackendUnavailableError:
        raise
    except MucudnnError as e:
        failures.append((_ANYTHING, f"{type(e).__name__}: {e}"))
    return SurveyedBatch(size, tuple(accepted), tuple(failures))
