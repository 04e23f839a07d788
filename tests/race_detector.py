"""Watch a step being run: is every read ordered after its write, by what was done?

It knows nothing of how a program was made. The compute queue and every copy have a set
of copies known to be done before them, as bits of an integer: a copy knows what the
compute queue knew when it was started, what it was told to wait for, and those before
it in its own direction. Two touches of the same bytes, one of them a write, must know
of each other. And what a step reads must be what was last written there.
"""

from mucudnn.runtime.executor.tasks import ByteRange, PendingCopy, Program, Task


class RaceError(Exception):
    """Something touches memory without waiting for what used it before."""


class RaceDetector:
    """Watches an executor on the CPU: the state of memory and queues during a task.

    Memory that is allocated or freed becomes NaN in every floating-point type. `tasks`
    are those of the step so far.
    """

    def overwrite(self, memory) -> None:
        memory[...] = 0xFF

    def begin(self, program: Program, written: tuple[ByteRange, ...]) -> None:
        self.tasks: list[Task] = []
        self._writers: dict[str, dict[ByteRange, str]] = {}
        self._spoilt: dict[ByteRange, tuple[str, str]] = {}
        for part in written:
            self._of(part)[part] = "the feed"
        self._copies: list[PendingCopy] = []
        self._first = -program.copies
        self._known = 0
        self._knows: dict[int, int] = {}
        self._lane: dict[str, int] = {}
        for copy in program.before:
            self._started(copy, self._lane.get(copy.stream, 0))

    def before(self, task: Task) -> None:
        """A task is about to be called.

        Raises:
            RaceError: It reads or writes too early, or something else than
                it should; names both instructions.
        """
        self.tasks.append(task)
        if task.waits_for is not None:
            self._known |= self._knows[task.waits_for]
            self._copies = [c for c in self._copies if not self._done(c, self._known)]
            return
        known = self._known
        if task.copy is not None:
            known |= self._lane.get(task.copy.stream, 0)
            for number in task.after:
                known |= self._knows[number]
        for part in task.reads:
            self._ordered(task, part, known, writes=False)
            self._intact(task, part)
        for part in task.writes:
            self._ordered(task, part, known, writes=True)
            self._note(task, part)
        if task.copy is not None:
            self._started(task.copy, known)

    def _started(self, copy: PendingCopy, known: int) -> None:
        """What a copy knows is done when it is: what it knew, and itself."""
        known |= 1 << copy.number - self._first
        self._knows[copy.number] = self._lane[copy.stream] = known
        self._copies.append(copy)

    def _done(self, copy: PendingCopy, known: int) -> bool:
        """Whether a copy is among those known to be done."""
        return bool(known >> (copy.number - self._first) & 1)

    def _of(self, part: ByteRange) -> dict[ByteRange, str]:
        """Bytes of the same memory that are as they were written, and by whom."""
        return self._writers.setdefault(part.space, {})

    def _ordered(
        self, task: Task, part: ByteRange, known: int, *, writes: bool
    ) -> None:
        for copy in self._copies:
            touches = copy.target.overlaps(part) or (
                writes and copy.source.overlaps(part)
            )
            if touches and not self._done(copy, known):
                doing = "writes" if writes else "reads"
                raise RaceError(
                    f"{task.label} {doing} {_text(part)}, "
                    f"not ordered after {copy.label}"
                )

    def _intact(self, task: Task, part: ByteRange) -> None:
        """What is read was written whole, for the same storage, and is still there."""
        if part in self._of(part):
            return
        if part in self._spoilt:
            writer, spoiler = self._spoilt[part]
            raise RaceError(
                f"{task.label} reads {_text(part)}, which {writer} wrote "
                f"and {spoiler} has overwritten since"
            )
        raise RaceError(f"{task.label} reads {_text(part)}: nothing wrote it")

    def _note(self, task: Task, part: ByteRange) -> None:
        here = self._of(part)
        for other in [other for other in here if other.overlaps(part)]:
            self._spoilt[other] = here.pop(other), task.label
        if part.storage:
            self._spoilt.pop(part, None)
            here[part] = task.label


def _text(part: ByteRange) -> str:
    what = part.storage or "a workspace"
    return f"{what!r} at {part.space} bytes {part.start} to {part.stop}"
