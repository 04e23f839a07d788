"""Which algorithms there are and which fit a limit, with nothing measured.

A library tells of its algorithms and their workspaces without running them; where it
can do so from a description of a device, no device is needed. Algorithms are in the
library's order of preference: the first is what it would itself choose. Those that the
numerics do not accept are counted and otherwise left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends import Backend
from mucudnn.codecs.values import problem_to_dict
from mucudnn.errors import BackendUnavailableError, MucudnnError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.numerics import Numerics
from mucudnn.ir.status import RowStatus
from mucudnn.notebook import drawn
from mucudnn.passes.microbatch import (
    BatchPolicy,
    aligned_batches,
    candidate_batches,
)
from mucudnn.passes.registry import name_of
from mucudnn.studies.advance import Advance, advancing
from mucudnn.suites import Layer

__all__ = [
    "Algorithm",
    "AlgorithmSurvey",
    "SurveyInterrupted",
    "SurveyedBatch",
    "SurveyedLayer",
    "WithinLimit",
    "survey_algorithms",
]

SCHEMA = 1
_ANYTHING = "*"
"""Stands for every algorithm where the library refused to list any."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a library says of one algorithm at one micro-batch size."""

    algo: str
    workspace: int
    math_mode: str
    deterministic: bool
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "algo": self.algo,
            "workspace": self.workspace,
            "math_mode": self.math_mode,
            "deterministic": self.deterministic,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class WithinLimit:
    """What is left under a limit.

    Attributes:
        algorithms: How many need no more workspace than that.
        first_choice_fits: Whether the library's first choice is among them.
        best: The one that the library ranks highest among them; None if there is none.
    """

    algorithms: int
    first_choice_fits: bool
    best: Algorithm | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "algorithms": self.algorithms,
            "first_choice_fits": self.first_choice_fits,
            "best": None if self.best is None else self.best.to_json(),
        }


@dataclass(frozen=True, slots=True)
class SurveyedBatch:
    """One micro-batch size of one convolution.

    Attributes:
        batch: Micro-batch size.
        algorithms: Those that are accepted, in the library's order of preference.
        failures: (algorithm, reason) of the others.
    """

    batch: int
    algorithms: tuple[Algorithm, ...]
    failures: tuple[tuple[str, str], ...] = ()

    @property
    def refused(self) -> int:
        """How many can run but are not accepted."""
        return sum(
            RowStatus.of(reason) is RowStatus.REFUSED for _, reason in self.failures
        )

    @property
    def first_choice(self) -> Algorithm | None:
        """What the library would itself choose."""
        return self.algorithms[0] if self.algorithms else None

    @property
    def least_workspace(self) -> int | None:
        """Bytes that the smallest needs."""
        return min((a.workspace for a in self.algorithms), default=None)

    @property
    def greatest_workspace(self) -> int | None:
        """Bytes that the largest needs."""
        return max((a.workspace for a in self.algorithms), default=None)

    def within(self, limit: int) -> WithinLimit:
        """What fits in `limit` bytes."""
        fitting = [a for a in self.algorithms if a.workspace <= limit]
        best = fitting[0] if fitting else None
        return WithinLimit(
            len(fitting), best is not None and best is self.algorithms[0], best
        )

    def to_json(self, limits: Sequence[int]) -> dict[str, Any]:
        """Plain values; `AlgorithmSurvey.to_json` says which."""
        first = self.first_choice
        return {
            "batch": self.batch,
            "algorithms": len(self.algorithms),
            "refused": self.refused,
            "least_workspace": self.least_workspace,
            "greatest_workspace": self.greatest_workspace,
            "first_choice": None if first is None else first.to_json(),
            "fits": {str(limit): self.within(limit).to_json() for limit in limits},
            "all": [a.to_json() for a in self.algorithms],
            "failures": [
                {"algo": algo, "reason": reason} for algo, reason in self.failures
            ],
        }


@dataclass(frozen=True, slots=True)
class SurveyedLayer:
    """One direction of one layer; `batches` are ascending, the last is the whole."""

    name: str
    problem: ConvProblem
    batches: tuple[SurveyedBatch, ...]

    @property
    def direction(self) -> Direction:
        """Which of the three kernels."""
        return self.problem.direction

    def largest_batch(self, limit: int) -> int | None:
        """The largest micro-batch at which the library's first choice fits."""
        sizes = [b.batch for b in self.batches if b.within(limit).first_choice_fits]
        return max(sizes, default=None)

    def to_json(self, limits: Sequence[int]) -> dict[str, Any]:
        """Plain values; `AlgorithmSurvey.to_json` says which."""
        return {
            "name": self.name,
            "direction": self.direction.value,
            "problem": problem_to_dict(self.problem),
            "largest_batch": {
                str(limit): self.largest_batch(limit) for limit in limits
            },
            "batches": [b.to_json(limits) for b in self.batches],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSurvey:
    """Every layer, micro-batch size and limit.

    Attributes:
        backend: Name of the backend.
        fingerprint: Its device and libraries.
        batch_policy: Which micro-batch sizes were candidates.
        numerics: Which ways of computing were accepted.
        limits: Bytes of workspace.
        layers: What is done.
        asked: How many were to be done.
    """

    backend: str
    fingerprint: str
    batch_policy: str
    numerics: str
    limits: tuple[int, ...]
    layers: tuple[SurveyedLayer, ...]
    asked: int

    def to_json(self) -> dict[str, Any]:
        """Plain values that `json.dumps(…, allow_nan=False)` accepts.

        An algorithm is written `{"algo": …, "workspace": bytes, "math_mode": …,
        "deterministic": bool, "notes": […]}`, abbreviated `{…}` here; keys of `fits`
        and `largest_batch` are limits in bytes; what does not exist is null::

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
            "schema": SCHEMA,
            "backend": self.backend,
            "fingerprint": self.fingerprint,
            "batch_policy": self.batch_policy,
            "numerics": self.numerics,
            "limits": list(self.limits),
            "interrupted": len(self.layers) < self.asked,
            "layers": [layer.to_json(self.limits) for layer in self.layers],
        }

    def _repr_html_(self) -> str:
        """For notebooks."""
        return drawn("algorithm_survey", self)


class SurveyInterrupted(KeyboardInterrupt):
    """Ctrl-C; `survey` holds the layers that were done."""

    def __init__(self, found: AlgorithmSurvey) -> None:
        super().__init__()
        self.survey = found


def survey_algorithms(
    backend: Backend,
    layers: Sequence[Layer],
    policy: BatchPolicy,
    limits: Sequence[int],
    *,
    numerics: Numerics | None = None,
    progress: Callable[[Advance[SurveyedLayer]], None] | None = None,
) -> AlgorithmSurvey:
    """Ask the library for its algorithms at every micro-batch size of a policy.

    The sizes are those that a tuner would measure on that backend.

    Args:
        backend: Asked, never run.
        layers: Each in the direction of its problem.
        policy: Which micro-batch sizes are candidates.
        limits: Bytes of workspace.
        numerics: Which ways of computing are accepted; the default policy if not given.
        progress: Called when a layer begins and when it is done.

    Raises:
        SurveyInterrupted: Ctrl-C; carries what is done.
        BackendUnavailableError: The library is missing.
        ValueError: There is no policy of that name.
    """
    accepted = numerics or Numerics()
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
        return _layer(backend, layer, policy, accepted)

    try:
        for layer in advancing(layers, survey, progress):
            done.append(layer)
    except KeyboardInterrupt:
        raise SurveyInterrupted(found()) from None
    return found()


def _layer(
    backend: Backend, layer: Layer, policy: BatchPolicy, numerics: Numerics
) -> SurveyedLayer:
    problem = layer.problem
    sizes = candidate_batches(problem.batch, policy)
    aligned = aligned_batches(problem, sizes, backend.split_alignment)
    batches = (_batch(backend, problem, size, numerics) for size in aligned)
    return SurveyedLayer(layer.name, problem, tuple(batches))


def _batch(
    backend: Backend, problem: ConvProblem, size: int, numerics: Numerics
) -> SurveyedBatch:
    """Every algorithm at one size; a library that fails costs this size only."""
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
