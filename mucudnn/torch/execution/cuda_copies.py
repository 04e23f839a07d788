"""Copies between a CUDA device and pinned host memory, in two streams of their own.

No GPU has run this yet: its order of events is tested against a stand-in.

Three things could go wrong, and this is why none does. All memory of the device is
allocated, and freed, as the compute stream's, the stream that is current when a program
runs. PyTorch's allocator gives a freed block to whoever asks next for that stream, at
once: whatever the compute stream does with it later is ordered behind what it did
before, but a copy in another stream is not.

* A copy out reads a block. It waits for an event that the compute stream records when
  it is asked for, so it finds what was computed. The program waits for the copy before
  it frees the block: the compute stream waits for the copy's own event, and so does
  whatever is computed in the block from then on.
* A copy back writes a new block, which others may have had before. Their last use was
  in the compute stream, or was waited for by it; the copy waits for an event that the
  compute stream records after the block was allocated. What reads the block is behind
  the program's wait.
* Bytes of the host are used by one copy after the other: each waits for the last event
  of its bytes, the copy out of the next step for the copy back of this one, too.

`Tensor.record_stream` would serve the first two, and not the promise of a peak: a block
that it marks is free again when the allocator happens to find its event done. Should a
step fail between a copy's begin and the wait for it, `settle` waits for all of them
before the blocks go.

The processor never waits. Pinned memory is of PyTorch's allocator of host memory, which
keeps what was freed until the copies that used it are done.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from mucudnn.torch.execution.copies import bytes_of


class StreamLeaving:
    """A storage that has left the device, or is on its way.

    Args:
        host: Its bytes on the host.
        copies: What copies it.
        done: Recorded behind its last copy; None if nothing is under way.
    """

    __slots__ = ("_copies", "done", "host")

    def __init__(
        self, host: torch.Tensor, copies: "StreamCopies", done: Any = None
    ) -> None:
        self.host = host
        self.done = done
        self._copies = copies

    def wait(self) -> None:
        """Have the current stream wait for the last copy that was begun."""
        if self.done is not None:
            self._copies.wait_for(self.done)


class StreamCopies:
    """Copies by two streams, which are made when the first copy is.

    Args:
        device: A CUDA device.
        reuse: Keep the host's bytes of every slot from step to step. Not where two
            steps may be under way at once.
        cuda: PyTorch's module of that name.
        host_bytes: What allocates on the host.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        reuse: bool,
        cuda: Any = torch.cuda,
        host_bytes: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._device = device
        self._cuda = cuda
        self._host_bytes = host_bytes or _pinned
        self._slots: dict[Hashable, StreamLeaving] | None = {} if reuse else None
        self._streams: tuple[Any, Any] | None = None
        self._pending: set[Any] = set()

    def begin(self) -> Callable[[torch.Tensor, str], StreamLeaving]:
        """What begins copies out in one run."""
        return self.out

    def out(self, tensor: torch.Tensor, slot: Hashable) -> StreamLeaving:
        """Begin to copy the storage of a tensor to the host."""
        whole = bytes_of(tensor)
        leaving = self._leaving(whole.numel(), slot)
        leaving.done = self._copy(self._lanes()[0], leaving.host, whole, leaving.done)
        return leaving

    def back(self, leaving: StreamLeaving) -> torch.Tensor:
        """Begin to copy it back; the bytes that it will have."""
        found = torch.empty(
            leaving.host.numel(), dtype=torch.uint8, device=self._device
        )
        leaving.done = self._copy(self._lanes()[1], found, leaving.host, leaving.done)
        return found

    def home(self, tensor: torch.Tensor, leaving: StreamLeaving) -> None:
        """Begin to copy the storage of a tensor to where it came from."""
        whole = bytes_of(tensor)
        leaving.done = self._copy(self._lanes()[0], leaving.host, whole, leaving.done)

    def left(self, host: torch.Tensor, storage: str) -> StreamLeaving:
        """What is on the host, and has no copy under way."""
        return StreamLeaving(host, self)

    def settle(self) -> None:
        """Have the current stream wait for every copy that nobody has waited for."""
        for done in tuple(self._pending):
            self.wait_for(done)

    def wait_for(self, done: Any) -> None:
        """Have the current stream wait for a copy."""
        self._cuda.current_stream(self._device).wait_event(done)
        self._pending.discard(done)

    def _leaving(self, nbytes: int, slot: Hashable) -> StreamLeaving:
        if self._slots is None:
            return StreamLeaving(self._host_bytes(nbytes), self)
        found = self._slots.get(slot)
        if found is None:
            found = self._slots[slot] = StreamLeaving(self._host_bytes(nbytes), self)
        return found

    def _lanes(self) -> tuple[Any, Any]:
        if self._streams is None:
            stream = self._cuda.Stream
            self._streams = stream(self._device), stream(self._device)
        return self._streams

    def _copy(
        self, lane: Any, target: torch.Tensor, source: torch.Tensor, after: Any
    ) -> Any:
        """Queue one copy behind what is computed so far; what is recorded behind it.

        The current stream is asked for before the lane's is made current: an event of
        the lane's own would be no wait at all.
        """
        lane.wait_event(self._cuda.current_stream(self._device).record_event())
        if after is not None:
            lane.wait_event(after)
            self._pending.discard(after)  # who waits for this copy waits for that
        with self._cuda.stream(lane):
            target.copy_(source, non_blocking=True)
        done = lane.record_event()
        self._pending.add(done)
        return done


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
