"""The tuner of convolutions: problem -> measurements -> plan -> bound plan.

A `TableFiller` decides what to measure, here or on the workers of an executor. A
planner divides mini-batches by the tables, `validation` measures divisions and
`bound_plan` runs them.
"""

import math
import os
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NoReturn, Self

from mucudnn.arguments import check_integer, check_type
from mucudnn.backends import Backend, get_backend
from mucudnn.backends.recorded import recording_of
from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.measurement import ANY_LIMIT, LimitRange, Verdict
from mucudnn.ir.numerics import Numerics, RowStatus
from mucudnn.ir.sizes import format_bytes, parse_bytes
from mucudnn.passes.convolution.explain import Trial, explain
from mucudnn.passes.convolution.pareto import check_divisible
from mucudnn.passes.microbatch import (
    PLANNERS,
    BatchPolicy,
    Planner,
    aligned_batches,
    candidate_batches,
    divided_by,
    pareto_plans,
)
from mucudnn.passes.registry import name_of
from mucudnn.processes import PerProcess
from mucudnn.runtime.environment import USERS, CacheChoice, open_cache, tuner_options
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.bound_plan import Arena, BoundPlan, restore_plans
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_timer import (
    KernelTimer,
    MeasureLimits,
    check_room,
    measure_size,
)
from mucudnn.runtime.tuning.tables import Measured, Pruning, Sizes, TableFiller
from mucudnn.runtime.tuning.timing import StoppingRule, Timing
from mucudnn.runtime.tuning.validation import (
    ValidatedPlan,
    Validator,
    fastest_undivided,
)
from mucudnn.runtime.tuning.workers import Round, Workers, refuse_other_model

DEFAULT_WORKSPACE_LIMIT = 64 << 20
"""µ-cuDNN's default, in bytes."""


class Tuner:
    """Measures convolutions, plans them and runs the plans.

    Constructor arguments are the configuration. Thread-safe. A `with` block closes the
    tuner.

    Args:
        backend: A backend or its name.
        workspace_limit: Bytes (or "64MiB") that each kernel may use.
        total_workspace: Bytes that all kernels planned together may use; selects
            planner `workspace_division`.
        batch_policy: Micro-batch sizes to consider; a name or a function.
        planner: Name of a registered planner, or a function.
        cache: Storage of measurements: a file, created where it is missing, a
            `BenchmarkCache`, or None for memory only. The default is a file in the
            user's cache directory, except for backends that compute nothing.
        memory_limit: Bytes for operands and workspaces while measuring.
        time_limit_s: Seconds that one `measure` may take.
        prune: Skip rows that cannot be part of a good plan: at each size, algorithms
            far behind others that fit as well; under policy `all` also whole sizes.
        validate: Measure a divided plan once and reject it if it does not beat the
            undivided one.
        numerics: Accepted numerics, as a `Numerics` or in words
            (`strict,deterministic`).
        replay: Launch a whole plan at once where the backend can (a CUDA graph), for
            repeated calls with the same operands.
        verify: Compare the result of a divided plan with that of one undivided call on
            the same operands, in every `verify`-th run beginning with the first. Such a
            run takes several times as long, and memory for a second result. A
            difference that rounding does not explain raises `VerificationError`. None
            or 0 never compares.
        benchmark_backends: Devices of one model to measure on at once; `backend` alone
            by default.
        rule: Decides when a kernel has been timed enough.
        progress: Called after each measurement.
        isolate: Measure in a child process, so that a kernel that crashes or corrupts
            the device's context costs one row; None does so where the backend may
            crash.
        executor: A `concurrent.futures.Executor` (of processes, MPI, dask) whose
            workers measure instead. They need a device of the same model at the
            backend's index. The caller shuts it down.

    Raises:
        ValueError: A name, size or policy is not valid, the devices differ, or both
            `benchmark_backends` and `executor` are given.
        TypeError: `cache`, `executor` or `verify` has a wrong type.
    """

    def __init__(
        self,
        *,
        backend: Backend | str = "cpu",
        workspace_limit: int | str = DEFAULT_WORKSPACE_LIMIT,
        total_workspace: int | str | None = None,
        batch_policy: BatchPolicy = "powers_of_two",
        planner: str | Planner = "workspace_reuse",
        cache: CacheChoice = USERS,
        memory_limit: int | str | None = None,
        time_limit_s: float | None = None,
        prune: bool = True,
        validate: bool = True,
        numerics: Numerics | str = "tf32",
        replay: bool = False,
        verify: int | None = None,
        benchmark_backends: Sequence[Backend] = (),
        rule: StoppingRule | None = None,
        progress: Callable[[Measured], None] | None = None,
        isolate: bool | None = None,
        executor: Executor | None = None,
    ) -> None:
        # What to plan for, and under which limits.
        self.backend = get_backend(backend) if isinstance(backend, str) else backend
        self.workspace_limit = parse_bytes(workspace_limit)
        self.total_workspace = (
            None if total_workspace is None else parse_bytes(total_workspace)
        )
        self.planner = PLANNERS.resolve(planner)
        if self.total_workspace is not None:
            self.planner = PLANNERS.resolve("workspace_division")
        self.batch_policy = batch_policy
        memory = math.inf if memory_limit is None else parse_bytes(memory_limit)
        self.memory_limit = memory
        self.numerics = (
            Numerics.parse(numerics) if isinstance(numerics, str) else numerics
        )
        self.rule = rule or StoppingRule()
        # Where to measure: here, on several devices, or by an executor.
        self.benchmark_backends = tuple(benchmark_backends) or (self.backend,)
        if executor is not None and benchmark_backends:
            raise ValueError(
                "give either benchmark_backends, devices of this process, or an "
                "executor, whose workers have devices of their own"
            )
        self.executor = executor
        self._cache_choice = cache
        self._cache: BenchmarkCache | None = open_cache(cache, self.backend)
        self._isolation = Isolation(isolate)
        self._lock = PerProcess(threading.RLock)
        candidate_batches(1, batch_policy)
        for other in self.benchmark_backends:
            mine = self.backend.device.fingerprint
            refuse_other_model(mine, other.device.fingerprint)
        self._workers = None if executor is None else Workers(executor, isolate)
        self._time_limit_s = math.inf if time_limit_s is None else time_limit_s
        self._prune, self._progress = prune, progress
        # For the deadline only; children have their own.
        self._clock: Callable[[], float] = lambda: time.monotonic()
        self._tables: dict[ConvProblem, tuple[LimitRange, PerfTable]] = {}
        # How plans are proved and run.
        # The cache is passed as a function: `close` drops it, and a later use reopens
        # it.
        self._validator = Validator(self.backend, lambda: self.cache, self.rule, memory)
        self._validates, self._replay = validate, replay
        if isinstance(verify, bool):
            raise TypeError(
                f"verify must be a number of runs, got {verify}; 1 verifies every "
                "run, 100 every hundredth, None no run"
            )
        self._verify = 0 if verify is None else check_integer("verify", verify, least=0)
        self._arena = Arena(self.backend.device)
        self.bound: dict[Hashable, BoundPlan] = {}
        """Problem -> plan; also call signature -> plan, as a shortcut."""

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, **overrides: Any
    ) -> Self:
        """Create a tuner configured by µ-cuDNN's environment variables.

        `MUCUDNN_BATCH_SIZE_POLICY`, `MUCUDNN_WORKSPACE_LIMIT`,
        `MUCUDNN_TOTAL_WORKSPACE_SIZE` (above 0 selects workspace division),
        `MUCUDNN_DATABASE` (a path; by default the user's cache directory) and
        `MUCUDNN_BENCHMARK_DEVICES` (`all` or a comma list). Arguments take precedence
        over the environment.

        Raises:
            ValueError: A variable is not valid; the message names it.
        """
        env = os.environ if environ is None else environ
        return cls(**tuner_options(env, overrides))

    def __repr__(self) -> str:
        total, ready = self.total_workspace, {*map(id, self.bound.values())}
        limit = self.workspace_limit if total is None else total
        return (
            f"Tuner({self.backend.name}, {format_bytes(limit)} of workspace "
            f"{'a kernel' if total is None else 'in all'}, "
            f"{name_of(self.batch_policy)}, {name_of(self.planner)}, "
            f"{len(ready)} ready)"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Tuner cannot be copied or pickled, as it holds a device, a lock and a "
            "cache; share this one among threads and forked processes, or create "
            "another with the same arguments, which reads measurements from the same "
            "cache"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release workspaces, child processes and the cache's file.

        A `BenchmarkCache` that was passed in stays open. The tuner remains usable and
        reopens what it needs.
        """
        with self._lock.value:
            self._isolation.close()
            self._arena.release()
            given = isinstance(self._cache_choice, BenchmarkCache)
            if not given and self._cache is not None and self._cache.path is not None:
                self._cache.close()
                self._cache = None

    @property
    def cache(self) -> BenchmarkCache:
        """Storage of measurements."""
        with self._lock.value:
            if self._cache is None:
                self._cache = open_cache(self._cache_choice, self.backend)
            return self._cache

    def forget(self) -> None:
        """Drop tables in memory, to read them from the (shared) cache again."""
        with self._lock.value:
            self._tables.clear()

    def measure(
        self,
        problem: ConvProblem,
        *,
        time_limit_s: float | None = None,
        memory_limit: float = math.inf,
        limits: LimitRange = ANY_LIMIT,
    ) -> PerfTable:
        """Measure every algorithm at every candidate micro-batch size of a problem.

        Rows of failed algorithms carry the error. Rows that a limit prevented carry the
        limit; such a table is measured again by the next call.

        Args:
            problem: Convolution to measure.
            time_limit_s: Seconds, instead of the tuner's `time_limit_s`.
            memory_limit: Bytes, in addition to the tuner's `memory_limit`.
            limits: Workspace limits under which plans will be made; with `prune`, rows
                that no such plan needs are skipped.

        Raises:
            PlanningError: There are too many samples to be divided.
            OutOfMemoryError: There is no room for the smallest micro-batch.
        """
        (table,) = self._measured([problem], limits, time_limit_s, memory_limit)
        return table

    def measure_all(
        self,
        problems: Sequence[ConvProblem],
        *,
        time_limit_s: float | None = None,
        limits: LimitRange = ANY_LIMIT,
    ) -> tuple[PerfTable, ...]:
        """Measure several problems; an executor's workers do so concurrently.

        `time_limit_s` applies to all of them together; see `measure`.
        """
        return self._measured(problems, limits, time_limit_s)

    def plan(self, problems: Sequence[ConvProblem]) -> tuple[ConvPlan, ...]:
        """Plan problems, each at least as fast as undivided under its limit.

        Raises:
            PlanningError: A problem has no plan within the limit.
        """
        tables = self.measure_all(problems, limits=self._limits)
        limit, total = self.workspace_limit, self.total_workspace
        plans = divided_by(self.planner, tables, limit if total is None else total)
        # Of a total, a plan's limit is the workspace that it was given.
        plans = tuple(p.under(limit if total is None else p.workspace) for p in plans)
        if not self._validates:
            return plans
        return tuple(map(self._validator.accept_if_faster, plans, tables))

    def undivided(self, table: PerfTable, workspace_limit: int) -> ConvPlan | None:
        """Return the fastest single call within the limit, or None."""
        return fastest_undivided(table, workspace_limit)

    def validate(
        self,
        plan: ConvPlan,
        undivided: ConvPlan | None,
        *,
        time_limit_s: float = math.inf,
    ) -> ValidatedPlan:
        """Return the faster of two plans, run in turn; see `Validator.validate`."""
        return self._validator.validate(plan, undivided, time_limit_s)

    def time_plans(
        self, plans: Sequence[ConvPlan], *, time_limit_s: float = math.inf
    ) -> tuple[Timing, ...]:
        """Run plans of one problem in turn; see `Validator.time_plans`."""
        return self._validator.time_plans(plans, time_limit_s)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Measured ratios of divided plans to their baselines."""
        return self._validator.verdicts

    def explain(self, plan: ConvPlan) -> str:
        """Explain in words why a plan was chosen under its limit."""
        check_type("plan", plan, ConvPlan, "a ConvPlan")
        limit = plan.workspace_limit
        limits = self._limits if limit is None else self._limits.including(limit)
        table = self.measure(plan.problem, limits=limits)
        if limit is None:
            limit = max(self.workspace_limit, plan.workspace)
        divided: ConvPlan | None = plan
        if not plan.divided:  # perhaps a division was rejected for it
            try:
                (divided,) = self.planner([table], limit)
            except PlanningError:
                divided = None
        baseline = fastest_undivided(table, limit)
        if baseline is None or divided is None or not divided.divided:
            return explain(table, plan, limit)
        trial = Trial(divided, self._validator.known(divided, baseline))
        return explain(table, plan, limit, trial)

    def prepare(self, problems: Sequence[ConvProblem]) -> tuple[ConvPlan, ...]:
        """Plan problems ahead, so that their first calls do not measure.

        With `total_workspace`, all kernels that share it must be named in one call.
        """
        return tuple(self.adopt(plan).plan for plan in self.plan(problems))

    def compiled(self, problem: ConvProblem) -> BoundPlan:
        """Return the bound plan of a problem, planning it on first use."""
        if (ready := self.bound.get(problem)) is not None:
            return ready
        with self._lock.value:
            if (ready := self.bound.get(problem)) is None:
                # Another thread may have planned the problem while this one waited for
                # the lock.
                (ready,) = map(self.adopt, self.plan([problem]))
            return ready

    def adopt(self, plan: ConvPlan) -> BoundPlan:
        """Use `plan` for its problem from now on (planned ahead, or by hand)."""
        check_type("plan", plan, ConvPlan, "a ConvPlan")
        restore_plans(self.backend, self.cache, plan)
        with self._lock.value:
            if (known := self.bound.get(plan.problem)) is not None:
                known.use(plan)
                return known
            ready = BoundPlan(
                self.backend,
                plan,
                self._smaller,
                self._arena,
                replay=self._replay,
                verify=self._verify,
            )
            self.bound[plan.problem] = ready
            return ready

    @property
    def _limits(self) -> LimitRange:
        """Range of limits that plans use; a kernel's share of a total may be 0."""
        if self.total_workspace is not None:
            return LimitRange(most=self.total_workspace)
        return LimitRange(self.workspace_limit, self.workspace_limit)

    def _smaller(self, plan: ConvPlan) -> Sequence[ConvPlan]:
        table = self.measure(plan.problem, limits=self._limits)
        return pareto_plans(table, plan.workspace)

    def _measured(
        self,
        problems: Sequence[ConvProblem],
        limits: LimitRange,
        time_limit_s: float | None,
        memory_limit: float = math.inf,
    ) -> tuple[PerfTable, ...]:
        """Return tables, the kept ones that cover the limits and new ones."""
        wanted = "a list of problems, such as [problem]"
        check_type("problems", problems, Collection, wanted)
        for problem in problems:
            check_type("problem", problem, ConvProblem, "a ConvProblem")
        found = self._known(problems, limits)
        if any(problem not in found for problem in problems):
            # Two kernels that are timed at once would disturb each other.
            with self._lock.value:
                found = self._known(problems, limits)  # another thread may be done
                missing = [p for p in dict.fromkeys(problems) if p not in found]
                self._check(missing)
                begun = self._clock()
                # One device measures problem by problem; workers need all of them to be
                # busy.
                groups = [[p] for p in missing] if self._workers is None else [missing]
                for group in filter(None, groups):
                    if time_limit_s is None:
                        deadline = self._clock() + self._time_limit_s * len(group)
                    else:
                        deadline = begun + time_limit_s
                    measure_limits = MeasureLimits(
                        rule=self.rule,
                        memory_limit=min(self.memory_limit, memory_limit),
                        deadline=deadline,
                        clock=self._clock,
                    )
                    found |= self._fill(group, measure_limits, limits)
        return tuple(found[problem] for problem in problems)

    def _known(
        self, problems: Sequence[ConvProblem], limits: LimitRange
    ) -> dict[ConvProblem, PerfTable]:
        """Return the kept tables that cover these limits."""
        known = ((p, self._tables[p]) for p in problems if p in self._tables)
        return {p: table for p, (served, table) in known if served.covers(limits)}

    def _check(self, problems: Sequence[ConvProblem]) -> None:
        """Raise an error for problems that cannot be measured at all."""
        for problem in problems if self.batch_policy != "undivided" else ():
            every = self.batch_policy == "all"
            sizes = problem.batch if every else problem.batch.bit_length()
            check_divisible(problem.batch, sizes)
        for problem in problems if self._workers is None else ():
            least = min(candidate_batches(problem.batch, self.batch_policy))
            micro = problem.with_batch(least)
            check_room(self.backend.device, f"the least of {micro}", micro.operands())

    def _fill(
        self,
        problems: Sequence[ConvProblem],
        limits: MeasureLimits,
        workspace: LimitRange,
    ) -> dict[ConvProblem, PerfTable]:
        """Measure problems and keep complete tables; failures are rows."""

        def filler_of(problem: ConvProblem) -> TableFiller:
            backend, pruning = self.benchmark_backends[0], Pruning.NONE
            sizes = candidate_batches(problem.batch, self.batch_policy)
            # Reading a recording takes no time, and plans were made with all its rows.
            if self._prune and recording_of(self.backend) is None:
                every = self.batch_policy == "all"
                pruning = Pruning.SIZES if every else Pruning.ALGORITHMS
            return TableFiller(
                backend,
                problem,
                limits,
                aligned_batches(problem, sizes, backend.split_alignment),
                self.cache,
                self.numerics,
                progress=self._progress,
                pruning=pruning,
                workspace=workspace,
            )

        done: dict[ConvProblem, PerfTable] = {}

        def rounds(same: Sequence[ConvProblem]) -> Iterator[Round]:
            for problem in same:
                filler = filler_of(problem)
                for sizes in filler.rounds(probe=True):
                    yield filler, sizes
                done[problem] = filler.table()

        if self._workers is None:
            for problem in problems:
                done[problem] = self._fill_here(filler_of(problem))
        else:
            # Problems that differ only in N share rows: measure them in sequence, the
            # largest N first.
            layers: dict[ConvProblem, list[ConvProblem]] = {}
            for problem in sorted(problems, key=lambda p: -p.batch):
                layers.setdefault(problem.with_batch(1), []).append(problem)
            self._workers.fill([rounds(same) for same in layers.values()])
        for problem, table in done.items():
            if not any(perf.status is RowStatus.LIMITED for perf in table.perfs):
                self._tables[problem] = workspace, table
        return done

    def _fill_here(self, filler: TableFiller) -> PerfTable:
        """Measure a table on the local devices, each with a share of the sizes."""
        timers = list(map(self._isolation.timer, self.benchmark_backends))

        def measure_share(timer: KernelTimer, sizes: Sizes) -> None:
            for batch, algos in sizes:
                measure_size(timer, filler.request(batch, algos), filler.keep)

        try:
            for sizes in filler.rounds(probe=False):
                if len(timers) == 1:
                    measure_share(timers[0], sizes)
                    continue
                shares = [sizes[i :: len(timers)] for i in range(len(timers))]
                with ThreadPoolExecutor(len(timers)) as pool:
                    list(pool.map(measure_share, timers, shares))
        finally:  # the next problem may need the memory
            for timer in timers:
                timer.release()
        return filler.table()
