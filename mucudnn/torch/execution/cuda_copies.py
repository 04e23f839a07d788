"""Copies between a CUDA device and pinned host memory, in two streams of their own.

Its order of events is tested against a stand-in, and by PyTorch's sanitizer on a GPU.

All device memory is allocated and freed on the compute stream, which is the stream that
is current when a program runs. PyTorch's allocator gives a freed block to the next
request on that stream at once: what the compute stream does with it later is ordered
behind what it did before, but a copy in another stream is not. Three hazards follow,
and each is excluded by events:

* A copy out reads a block. It waits for an event that the compute stream records when
  the copy is requested, so it reads what was computed. The program waits for the copy
  before it frees the block: the compute stream waits for the copy's own event, and so
  does whatever is computed in the block from then on.
* A copy back writes a new block, which other tensors may have had before. Their last
  use was in the compute stream, or was waited for by it; the copy waits for an event
  that the compute stream records after the block was allocated. Readers of the block
  are behind the program's wait.
* Host memory is used by one copy after the other: each copy waits for the last event of
  its bytes. So the offload of the next step waits for the prefetch of this one.

`Tensor.record_stream` would exclude the first two, but not keep the predicted peak: a
block that it marks is free again only when the allocator happens to find its event
done. If a step fails between the begin of a copy and the wait for it, `synchronize`
waits for all copies before the blocks are freed.

The processor never waits. Pinned memory is of PyTorch's allocator of host memory, which
keeps what was freed until the copies that used it are done.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from mucudnn.torch.execution.copies import OffloadedStorage, bytes_of


class StreamCopies:
    """Copies by two streams, which are created with the first copy.

    Args:
        device: A CUDA device.
        reuse: Keep the host memory of every storage from step to step. Not for steps of
            which two may be in flight at once.
        cuda: The module `torch.cuda`, or a stand-in.
        host_bytes: Allocates on the host; pinned memory by default.
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
        self._host_bytes = host_bytes or partial(
            torch.empty, dtype=torch.uint8, device="cpu", pin_memory=True
        )
        self._slots: dict[Hashable, OffloadedStorage] | None = {} if reuse else None
        # An event is created once where copies are made by one thread at a time: a wait
        # is for what was recorded last before it, so the event can be recorded again.
        self._ready: Any = None
        self._streams: tuple[Any, Any] | None = None
        self._pending: set[Any] = set()

    def start_run(self) -> Callable[[torch.Tensor, str], OffloadedStorage]:
        """Return the function that offloads a tensor of a storage in one run."""
        return self.offload

    def offload(self, tensor: torch.Tensor, slot: Hashable) -> OffloadedStorage:
        """Begin to copy the storage of a tensor to the host."""
        stored = None if self._slots is None else self._slots.get(slot)
        if stored is None:
            nbytes = tensor.untyped_storage().nbytes()
            stored = OffloadedStorage(self._host_bytes(nbytes), self)
            if self._slots is not None:
                self._slots[slot] = stored
        self.write_back(tensor, stored)
        return stored

    def prefetch(self, offloaded: OffloadedStorage) -> torch.Tensor:
        """Begin to copy an offloaded storage back; return its new bytes."""
        host = offloaded.host
        found = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        _, back = self._copy_streams()
        offloaded.done = self._copy(back, found, host, offloaded.done)
        return found

    def write_back(self, tensor: torch.Tensor, offloaded: OffloadedStorage) -> None:
        """Begin to copy the storage of a tensor to the bytes that it came from."""
        whole = bytes_of(tensor)
        out, _ = self._copy_streams()
        offloaded.done = self._copy(out, offloaded.host, whole, offloaded.done)

    def on_host(self, host: torch.Tensor, storage: str) -> OffloadedStorage:
        """Return a storage that is on the host, with no copy in flight."""
        return OffloadedStorage(host, self)

    def synchronize(self) -> None:
        """Make the current stream wait for every copy not yet waited for."""
        for done in tuple(self._pending):
            self.wait(done)

    def wait(self, done: Any) -> None:
        """Make the current stream wait for a copy."""
        self._cuda.current_stream(self._device).wait_event(done)
        self._pending.discard(done)

    def _copy_streams(self) -> tuple[Any, Any]:
        if self._streams is None:
            stream = self._cuda.Stream
            self._streams = stream(self._device), stream(self._device)
        return self._streams

    def _copy(
        self, stream: Any, target: torch.Tensor, source: torch.Tensor, after: Any
    ) -> Any:
        """Queue one copy behind what is computed so far; return the event behind it.

        The event of the compute stream is recorded before the copy stream is made
        current: an event of the copy stream itself would be no wait at all.
        """
        current = self._cuda.current_stream(self._device)
        ready = current.record_event(self._ready)
        stream.wait_event(ready)
        if after is not None:
            stream.wait_event(after)
            self._pending.discard(after)  # a wait for this copy includes that one
        with self._cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        reuses = self._slots is not None
        if reuses:
            self._ready = ready
        done = stream.record_event(after if reuses else None)
        self._pending.add(done)
        return done
