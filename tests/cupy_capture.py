"""What is launched while a stream is captured, as strict as CUDA is about it.

Streams join by waiting for an event of the capture, and have to be waited for before it
ends. Replayed, work on the captured stream runs at once, and other streams run at once
too or as late as they may.
"""


class CUDARuntimeError(RuntimeError):
    """As CuPy calls it."""


class Captured:
    """A graph, in the order of its launches.

    Args:
        origin: Address of the stream that is captured.
    """

    def __init__(self, origin):
        self.origin = origin
        self.events = {}
        self._launches = []
        self._knows = {origin: {}}  # stream -> how much of others is before its next

    def append(self, work):
        self.put(self.origin, work)

    def put(self, stream, work):
        """Whether the stream takes part, and the work is noted."""
        if stream not in self._knows:
            return False
        own = self._knows[stream]
        own[stream] = own.get(stream, 0) + 1
        self._launches.append(("work", stream, work))
        return True

    def record(self, event, stream):
        """Whether the stream takes part, and the event belongs to the capture."""
        if stream not in self._knows:
            return False
        self.events[event] = dict(self._knows[stream])
        self._launches.append(("record", stream, event))
        return True

    def wait(self, stream, event):
        """Whether the event belongs to the capture, which the stream joins."""
        if event not in self.events:
            if stream in self._knows:
                raise CUDARuntimeError("cudaErrorStreamCaptureIsolation")
            return False
        own = self._knows.setdefault(stream, {})
        for other, count in self.events[event].items():
            own[other] = max(own.get(other, 0), count)
        self._launches.append(("wait", stream, event))
        return True

    def end(self):
        known = self._knows[self.origin]
        for stream, own in self._knows.items():
            if known.get(stream, 0) < own.get(stream, 0):
                raise CUDARuntimeError("cudaErrorStreamCaptureUnjoined")

    def replay(self, make):
        """Launch it.

        Args:
            make: Makes a stream, given whether it runs at once in any case.
        """
        streams = {ptr: make(ptr == self.origin) for ptr in self._knows}
        events = {}
        for kind, stream, what in self._launches:
            here = streams[stream]
            match kind:
                case "work":
                    here.put(what)
                case "record":
                    events[what] = here, here.end
                case "wait":
                    there, position = events[what]
                    here.put(lambda s=there, p=position: s.drain(p))


CAPTURED: list[Captured] = []
"""Graphs that are being captured: what is launched goes to the last."""
