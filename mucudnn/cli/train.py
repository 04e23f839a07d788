"""`mucudnn train`: train a network, and print its results."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import cloup
from click.core import ParameterSource

from mucudnn.cli import train_options
from mucudnn.cli.app import BadInputError, ExitCode, bad_input
from mucudnn.cli.options import chosen, listing_option, make_tuner, model_argument
from mucudnn.cli.output import emit, refuse_same, refuse_unwritable
from mucudnn.cli.own_code import import_option, list_models
from mucudnn.cli.progress import Remaining, Show, TrainingWords, progress_display
from mucudnn.cli.train_ranks import Group, group_of, own_settings, step_point
from mucudnn.ir.fleet import StepPoint
from mucudnn.ir.optimizers import parse_learning_rate
from mucudnn.ir.sizes import format_count
from mucudnn.report.text import bytes_text, ms_text

if TYPE_CHECKING:
    from mucudnn.cli.train_data import Work
    from mucudnn.passes.placement.layout import PlacedStep
    from mucudnn.runtime.training.checkpoints import Checkpoint, Checkpoints
    from mucudnn.runtime.training.history import EpochReport, Position
    from mucudnn.runtime.training.loop import Between, Handover
    from mucudnn.runtime.training.trainer import Trainer


class _MultiProcessCommand(cloup.Command):
    """A command of several processes: invalid options of one end all."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the options."""
        try:
            return super().make_context(*args, **extra)
        except click.ClickException:
            if (group := group_of()) is not None:
                with group.ends_together():
                    raise
            raise


@cloup.command(cls=_MultiProcessCommand)
@import_option
@model_argument
@train_options.data_options
@train_options.learning_options
@train_options.budget_options
@train_options.run_options
@train_options.output_options
@listing_option
@click.pass_context
def train(
    ctx: click.Context, /, model: str | None, json_file: str | None, **settings: Any
) -> None:
    """Train a network and test it after every epoch.

    Without --data, it trains on synthetic images.
    """
    group = group_of()
    with nullcontext() if group is None else group.ends_together():
        if group is not None:
            group.check_alike(model, settings)
        if settings["listing"]:
            if group is None or group.leads:
                list_models(json_file)
            return
        if model is None:
            raise BadInputError("name a network to train; --list lists them")
        _refuse_incomplete(ctx, json_file, settings)
        settings = dict(own_settings(settings, group))
        training = _Training(model, settings, group)
        interrupted = training.run(quiet=json_file == "-")
        training.gather()
        if training.leads:
            emit(json_file, training.to_json(interrupted=interrupted), training.show)
    if interrupted:
        ctx.exit(ExitCode.INTERRUPTED)


def _refuse_incomplete(
    ctx: click.Context, json_file: str | None, settings: Mapping[str, Any]
) -> None:
    """Refuse options that require others."""
    refuse_same({"--json": json_file, "--log": settings["log"]})
    if settings["checkpoint"] is None:
        for name in ("resume", "checkpoint_every"):
            if settings[name]:
                option = name.replace("_", "-")
                raise BadInputError(f"--{option} needs --checkpoint DIR")
    if settings["budget"] is None:
        for name in ("policy", "scheduler", "convolutions", "disk", "tiers"):
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise BadInputError(
                    f"--{name.replace('tiers', 'tier')} needs --budget SIZE"
                )
        if settings["split"] in ("auto", "height"):
            raise BadInputError(f"--split {settings['split']} needs --budget SIZE")


class _Training:
    """One invocation of the command with all its options."""

    def __init__(
        self, model: str, settings: Mapping[str, Any], group: Group | None
    ) -> None:
        self._model = model
        self._group = group
        self.leads = group is None or group.leads
        from mucudnn.cli.train_data import work_of

        self._checkpoints, self._resume = self._open_checkpoints(settings)
        # A training on synthetic data is continued on as much of it.
        data = "" if self._resume is None else str(self._resume.words.get("data"))
        if settings["data"] == "synthetic" and data.startswith("synthetic:"):
            settings = {**settings, "data": data}
        self._settings = settings

        self._make_work = partial(work_of, model, settings)
        with self._display(1) as show:
            show("reading the data", 0, 1)
            self._work = self._own_work(show)
        self._optimizer = train_options.optimizer_of(settings, self._work.training)
        self._words = train_options.words_of(self._work, self._optimizer, settings)
        if (found := self._resume) is not None:
            train_options.check_resumable(
                settings["checkpoint"], found, self._words, quiet=not self.leads
            )
        self._reports: dict[int, EpochReport] = {}
        self._ranks: Sequence[RankResult] = ()

    def _own_work(self, show: Show) -> "Work":
        """Return the work of this process: everything, or its part."""
        settings = self._settings
        if self._group is None:
            return self._make_work()
        tuner = make_tuner(settings)

        def measure(images: int) -> StepPoint:
            show(f"measuring a step of {format_count(images, 'image')}", 0, 1)
            return step_point(self._make_work(images).training, tuner, settings)

        with tuner.cache:
            batch = settings["batch"] // settings["accumulate"]
            shares = self._group.shares(settings["shares"], batch, measure)
        return self._group.part(self._make_work, shares)

    def run(self, *, quiet: bool) -> bool:
        """Train; return whether Ctrl-C ended it."""
        from mucudnn.runtime.training.loop import fit

        settings, work = self._settings, self._work
        epochs, batches = settings["epochs"], len(work.batches)
        quiet = quiet or not self.leads
        with self._display(batches, titled=True) as show:
            total = train_options.total_steps(work, settings)
            shown = TrainingWords(show, epochs, batches, steps=total, quiet=quiet)

            # Reports are noted as they come: `fit` returns none if Ctrl-C ends it.
            def progress(at: "Position", report: "EpochReport | None") -> None:
                if report is not None:
                    self._reports[report.epoch] = report
                shown(at, report)

            with (
                train_options.train_log(settings, self._resume, shown.show_test)
                if self.leads  # one process logs for all
                else nullcontext()
            ) as log:
                show("planning the step", 0, batches, title="preparing")
                self._trainer = self._make_trainer(shown)
                try:
                    reports = fit(
                        self._trainer,
                        work.batches,
                        work.test,
                        epochs=epochs,
                        max_steps=settings["steps"],
                        checkpoints=self._checkpoints if self.leads else None,
                        **chosen(settings, "checkpoint_every eval_every"),
                        words=self._words,
                        resume=self._resume,
                        progress=progress,
                        log=log,
                        between=self._between(shown),
                    )
                except KeyboardInterrupt:
                    return True
        self._reports |= {report.epoch: report for report in reports}
        return False

    def _between(self, shown: TrainingWords) -> "Between | None":
        """Replace the trainer between epochs if other shares are faster."""
        group = self._group
        if group is None:
            return None

        def hand_over() -> "Handover | None":
            shares = group.shares_now(self._trainer.compute_ms)
            if shares is None:
                return None
            state, steps = self._trainer.state.save(), self._trainer.steps
            self._trainer.close()
            self._work = group.part(self._make_work, shares)
            self._trainer = self._make_trainer(shown)
            self._trainer.state.load(state)
            self._trainer.steps = steps
            return self._trainer, self._work.batches, self._work.test

        return hand_over

    def gather(self) -> None:
        """Gather the results of all processes; a collective operation."""
        if (group := self._group) is None:
            return
        trainer = self._trainer
        own = RankResult(
            group.history[-1][group.together.rank],
            trainer.compute_ms,
            trainer.peak_bytes,
            None if trainer.budget is None else trainer.budget.nbytes,
        )
        self._ranks = group.together.all_gather(own)

    def _display(
        self, total: int, *, titled: bool = False
    ) -> AbstractContextManager[Show]:
        """Show progress from one process for all."""
        if self.leads:
            return progress_display(total, titled=titled)
        return nullcontext(Show(Remaining(), lambda at: None))

    def to_json(self, *, interrupted: bool) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            "model": self._model,
            **results_to_json(self._trainer, self._reports),
            "parameters": self._work.training.parameter_count,
            "shares": None if self._group is None else self._group.history,
            "ranks": [asdict(rank) for rank in self._ranks] or None,
            "interrupted": interrupted,
            "settings": dict(self._words),
        }

    def show(self) -> None:
        """Print the last lines: results, and the latest checkpoint."""
        click.echo(
            f"{format_count(self._trainer.steps, 'step')}, "
            f"{ms_text(self._trainer.step_ms)} ms each; "
            f"{bytes_text(self._trainer.peak_bytes)} of memory"
        )
        placed = self._trainer.placed
        if placed is not None and placed.plan.prediction.placement is not None:
            click.echo(str(placed.plan.prediction.placement))
        if self._trainer.splitting is not None:
            click.echo(self._trainer.splitting.reason)
        for segment in self._trainer.segments:
            click.echo(str(segment))
        if str(self._work.words["data"]).startswith("synthetic"):
            click.echo("The images were synthetic; --data names real ones.")
        for number, rank in enumerate(self._ranks):
            click.echo(f"rank {number}: {rank}")
        if self._checkpoints is not None and (steps := self._checkpoints.steps()):
            click.echo(f"checkpoint of step {steps[0]} in {self._checkpoints.folder}")

    def _open_checkpoints(
        self, settings: Mapping[str, Any]
    ) -> "tuple[Checkpoints | None, Checkpoint | None]":
        from mucudnn.runtime.training.checkpoints import Checkpoints

        folder = settings["checkpoint"]
        if folder is None:
            return None, None
        with bad_input():
            checkpoints = Checkpoints(folder)
        refuse_unwritable(folder)
        if settings["resume"]:
            found = checkpoints.load()
            if found is None and self.leads:
                click.echo(
                    f"mucudnn: {folder} has no checkpoint; training starts at step 0",
                    err=True,
                )
            return checkpoints, found
        if checkpoints.steps():
            raise BadInputError(
                f"{folder} holds checkpoints already; continue with --resume, or name "
                "another folder"
            )
        return checkpoints, None

    def _make_trainer(self, shown: TrainingWords) -> "Trainer":
        from mucudnn.runtime.training.history import plans_of, recall_races
        from mucudnn.runtime.training.trainer import Trainer

        settings, work = self._settings, self._work
        tuner = make_tuner(settings, progress=shown.measured)
        # A resumed training uses its plans and choices of kernels, for the same bits.
        known = {} if self._resume is None else plans_of(self._resume, tuner.backend)
        if self._resume is not None:
            recall_races(self._resume, tuner)
        total = train_options.total_steps(work, settings)
        with bad_input(), tuner.cache:
            rate = parse_learning_rate(
                settings["lr_schedule"],
                self._optimizer.learning_rate,
                warmup_steps=settings["warmup"],
                milestone_unit=len(work.batches),
            )
            return Trainer(
                work.training,
                work.evaluation,
                tuner=tuner,
                optimizer=self._optimizer,
                learning_rate=lambda step: rate.at(step, total),
                gradient_accumulation=settings["accumulate"],
                plans=known,
                progress=shown.prepared,
                together=None if self._group is None else self._group.together,
                **chosen(settings, "update_when seed loss_scale replay batch_norm"),
                **train_options.step_arguments(settings, tuner.backend.device),
            )


# Results of a training: JSON and the last lines of `mucudnn train`.


@dataclass(frozen=True, slots=True)
class RankResult:
    """Share, step time without waiting, and memory of one of several processes."""

    samples: int
    compute_ms: float
    peak_bytes: int
    budget_bytes: int | None

    def __str__(self) -> str:
        of = "" if self.budget_bytes is None else f" of {bytes_text(self.budget_bytes)}"
        return (
            f"{format_count(self.samples, 'image')}, "
            f"{ms_text(self.compute_ms)} ms without waiting; "
            f"{bytes_text(self.peak_bytes)}{of}"
        )


def results_to_json(
    trainer: "Trainer", reports: "Mapping[int, EpochReport]"
) -> dict[str, Any]:
    """Return all figures of a training as plain values."""
    return {
        "epochs": [
            _finite({**asdict(report), "epoch": report.epoch + 1})
            for _, report in sorted(reports.items())
        ],
        "step_ms": trainer.step_ms,
        "peak_bytes": trainer.peak_bytes,
        "budget_bytes": None if trainer.budget is None else trainer.budget.nbytes,
        "memory": _memory_to_json(trainer.placed),
        "segments": [segment.to_json() for segment in trainer.segments],
        "splitting": (
            None if trainer.splitting is None else trainer.splitting.to_json()
        ),
        "steps": trainer.steps,
        "backend": trainer.backend.name,
        "fingerprint": trainer.backend.device.fingerprint,
    }


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values that JSON cannot hold, such as a NaN loss, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _memory_to_json(placed: "PlacedStep | None") -> dict[str, Any] | None:
    """Return the plan's figures; None without a budget."""
    if placed is None:
        return None
    plan, tiers = placed.plan, placed.plan.prediction.placement
    return {
        "policy": plan.policy,
        "scheduler": plan.scheduler,
        "nbytes": placed.nbytes,
        "predicted_ms": plan.prediction.step_ms,
        "offloaded_bytes": plan.prediction.out_bytes,
        "recomputed_nodes": plan.recomputed,
        "mapped_chunks": placed.layout.mapped_chunks,
        "tiers": tiers and tiers.to_json(),
    }
