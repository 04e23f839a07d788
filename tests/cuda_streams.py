"""A strict stand-in for `torch.cuda`'s streams and events, on the CPU.

The compute stream runs at once. A copy in another stream runs as late as it may: when
something waits for it, directly or by way of other streams. Until then whatever reads
what it writes, lets go of what it touches, or began it before what it needs was
computed, is an error.
"""

import contextlib
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OrderingError(AssertionError):
    """Something happened before what it has to be behind."""


@dataclass(eq=False)
class Event:
    """How far every stream is that one knows of."""

    clocks: dict


@dataclass(eq=False)
class Stream:
    """A queue; its clocks say how much of every stream is ordered before its next."""

    cuda: "StandIn"
    name: str
    jobs: list = field(default_factory=list)
    clocks: dict = field(default_factory=dict)
    ran: int = 0

    def record_event(self, event=None):
        event = event or Event({})
        event.clocks = {**self.clocks, self: len(self.jobs)}
        return event

    def wait_event(self, event):
        for stream, count in event.clocks.items():
            self.clocks[stream] = max(self.clocks.get(stream, 0), count)
        if self is self.cuda.compute:  # what it computes next is behind all of these
            for stream, count in event.clocks.items():
                self.cuda.run(stream, count)


@dataclass(eq=False)
class Job:
    """One copy of a stream."""

    target: torch.Tensor
    source: torch.Tensor
    behind: dict
    done: bool = False


class StandIn(TorchDispatchMode):
    """`Stream`, `stream` and `current_stream`; a mode that watches operations."""

    def __init__(self):
        super().__init__()
        self.compute = Stream(self, "compute")
        self.streams = []
        self.current = self.compute
        self.copies = 0
        self._touched = {}  # address -> (begin, end, number of the last operation)
        self._at_work = False

    def Stream(self, device):  # noqa: N802  (its name there)
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._at_work:
            return function(*args, **kwargs)
        if self.current is not self.compute:
            if function is not torch.ops.aten.copy_.default:
                raise OrderingError(f"{function} in a copy stream")
            return self._queue(self.current, *args[:2])
        views = function.is_view or "set_" in str(function) or "empty" in str(function)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not views:
            self._check_reads(function, read)
        result = function(*args, **kwargs)
        if not views:
            made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.compute.jobs.append(function)
            for tensor in (*read, *made):
                self._touch(tensor)
        return result

    def run(self, stream, count):
        """Run the first jobs of a stream, and what they are behind."""
        if stream is self.compute:
            return
        while stream.ran < count:
            job = stream.jobs[stream.ran]
            stream.ran += 1
            for other, number in job.behind.items():
                if other is not stream:
                    self.run(other, number)
            self._alive(job)
            self._at_work = True
            job.target.copy_(job.source)
            self._at_work = False
            job.done = True

    def finish(self):
        """Nothing may be under way that nobody has waited for."""
        left = [j for stream in self.streams for j in stream.jobs if not j.done]
        if left:
            raise OrderingError(f"{len(left)} copies were never waited for")

    def _queue(self, stream, target, source):
        known = stream.clocks.get(self.compute, 0)
        for tensor in (target, source):
            if self._last_touch(tensor) > known:
                raise OrderingError("a copy began before what was computed before it")
        for other in self.streams:
            for number, job in enumerate(other.jobs, 1):
                mine = {_at(target), _at(source)} & {_at(job.target), _at(job.source)}
                seen = other is stream or stream.clocks.get(other, 0) >= number
                if mine and not job.done and not seen:
                    raise OrderingError("two copies of the same bytes race")
        stream.jobs.append(
            Job(target, source, {**stream.clocks, stream: len(stream.jobs)})
        )
        self.copies += 1
        return target

    def _check_reads(self, function, tensors):
        writing = function._schema.is_mutable
        for stream in self.streams:
            for job in stream.jobs[stream.ran :]:
                busy = {_at(job.target)} | ({_at(job.source)} if writing else set())
                if busy & {_at(t) for t in tensors}:
                    raise OrderingError(f"{function} before a copy was waited for")

    def _alive(self, job):
        """Whether others than this job have its bytes of the device still."""
        for tensor in (job.target, job.source):
            storage = tensor.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) <= 2:
                raise OrderingError("bytes were freed before their copy was waited for")

    def _touch(self, tensor):
        begin = _at(tensor)
        end = begin + tensor.untyped_storage().nbytes()
        self._touched[begin] = (end, len(self.compute.jobs))

    def _last_touch(self, tensor):
        begin = _at(tensor)
        end = begin + tensor.untyped_storage().nbytes()
        return max(
            (
                number
                for at, (stop, number) in self._touched.items()
                if at < end and begin < stop
            ),
            default=0,
        )


def _at(tensor):
    return tensor.untyped_storage().data_ptr()
