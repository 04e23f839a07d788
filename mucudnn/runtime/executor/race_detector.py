"""Watch a step being run: is every read ordered after its write, by what was done?

It knows nothing of how a program was made. The compute queue and every copy have a set
of copies known to be done before them, as bits of an integer: a copy knows what the
compute queue knew when it was started, what it was told to wait for, and those before
it in its own direction. Two touches of the same bytes, one of them a write, must know
of each other. And what a step reads must be what was last written there.
"""

from mucudnn.errors import ExecutionOrderError
from mucudnn.runtime.executor.hazards import PendingCopy, Span
from mucudnn.runtime.executor.program import Step

__all__ = ["OrderCheck"]


class OrderCheck:
    """The state of memory and queues during one step.

    Args:
        fed: Bytes that were written before it.
        before: Copies of the step before that may be running.
        copies: How many copies a step starts.
    """

    def __init__(
        self,
        fed: tuple[Span, ...],
        before: tuple[PendingCopy, ...] = (),
        copies: int = 0,
    ) -> None:
        self._writers: dict[str, dict[Span, str]] = {}
        self._spoilt: dict[Span, tuple[str, str]] = {}
        for span in fed:
            self._of(span)[span] = "the feed"
        self._copies: list[PendingCopy] = []
        self._first = -copies
        self._known = 0
        self._knows: dict[int, int] = {}
        self._lane: dict[str, int] = {}
        for copy in before:
            self._started(copy, self._lane.get(copy.lane, 0))

    def before(self, step: Step) -> None:
        """A step is about to be called.

        Raises:
            ExecutionOrderError: It reads or writes too early, or something else than
                it should; names both instructions.
        """
        if step.waits_for is not None:
            self._known |= self._knows[step.waits_for]
            self._copies = [c for c in self._copies if not self._done(c, self._known)]
            return
        known = self._known
        if step.copy is not None:
            known |= self._lane.get(step.copy.lane, 0)
            for number in step.after:
                known |= self._knows[number]
        for span in step.reads:
            self._ordered(step, span, known, writes=False)
            self._intact(step, span)
        for span in step.writes:
            self._ordered(step, span, known, writes=True)
            self._note(step, span)
        if step.copy is not None:
            self._started(step.copy, known)

    def _started(self, copy: PendingCopy, known: int) -> None:
        """What a copy knows is done when it is: what it knew, and itself."""
        known |= 1 << copy.number - self._first
        self._knows[copy.number] = self._lane[copy.lane] = known
        self._copies.append(copy)

    def _done(self, copy: PendingCopy, known: int) -> bool:
        """Whether a copy is among those known to be done."""
        return bool(known >> (copy.number - self._first) & 1)

    def _of(self, span: Span) -> dict[Span, str]:
        """Bytes of the same memory that are as they were written, and by whom."""
        return self._writers.setdefault(span.space, {})

    def _ordered(self, step: Step, span: Span, known: int, *, writes: bool) -> None:
        for copy in self._copies:
            touches = copy.target.meets(span) or (writes and copy.source.meets(span))
            if touches and not self._done(copy, known):
                doing = "writes" if writes else "reads"
                raise ExecutionOrderError(
                    f"{step.label} {doing} {_place(span)}, "
                    f"not ordered after {copy.label}"
                )

    def _intact(self, step: Step, span: Span) -> None:
        """What is read was written whole, for the same storage, and is still there."""
        if span in self._of(span):
            return
        if span in self._spoilt:
            writer, spoiler = self._spoilt[span]
            raise ExecutionOrderError(
                f"{step.label} reads {_place(span)}, which {writer} wrote "
                f"and {spoiler} has overwritten since"
            )
        raise ExecutionOrderError(
            f"{step.label} reads {_place(span)}: nothing wrote it"
        )

    def _note(self, step: Step, span: Span) -> None:
        here = self._of(span)
        for other in [other for other in here if other.meets(span)]:
            self._spoilt[other] = here.pop(other), step.label
        if span.storage:
            self._spoilt.pop(span, None)
            here[span] = step.label


def _place(span: Span) -> str:
    what = span.storage or "a workspace"
    return f"{what!r} at {span.space} bytes {span.start} to {span.stop}"
