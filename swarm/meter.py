"""How fast bytes move, measured only while they do."""

import math
import time

MEMORY_SECONDS = 30.0
"""Seconds of transfer after which a measurement counts for a third of what it did."""
KNOWN_BYTES = 1 << 20
"""Fewer bytes than this say more about buffers than about a line."""
LONGEST_SECONDS = 5.0
"""A longer silence within a stream is no slow line: somebody has hung up, and nobody has noticed yet."""
BUFFERED_BYTES = 1 << 20
"""So much of what a sender has sent may still be on its own machine."""
BUFFERED_SECONDS = 0.5
"""After this time buffers are full, and a line takes no more than it passes on."""


class Meter:
    """The rate of one line, over the time in which at least one of its streams moves.

    Idle time does not count: a peer that is asked for little is not a slow one.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        """Bytes per second, smoothed; 0 while too little has moved to tell."""
        self._bytes = 0.0
        self._seconds = 0.0
        self._streams = 0
        self._counted = 0.0
        """Until when time has been counted."""

    @property
    def is_running(self) -> bool:
        """Whether a stream moves."""
        return self._streams > 0

    def begin(self) -> None:
        """A stream starts to move."""
        if not self._streams:
            self._counted = time.monotonic()
        self._streams += 1

    def end(self) -> None:
        """A stream pauses or is over."""
        self._streams -= 1

    def moved(self, size: int) -> None:
        """Bytes of a stream that has begun have moved since the last time this was called."""
        now = time.monotonic()
        self.add(size, min(now - self._counted, LONGEST_SECONDS))
        self._counted = now

    def add(self, size: int, seconds: float) -> None:
        """Bytes that took so many seconds."""
        # numerator and denominator fade alike, so that neither the first measurement nor a short one counts for more
        # than its time
        fade = math.exp(-seconds / MEMORY_SECONDS)
        self._bytes = self._bytes * fade + size
        self._seconds = self._seconds * fade + seconds
        if self._bytes >= KNOWN_BYTES and self._seconds > 0:
            self.rate = self._bytes / self._seconds


class Outflow:
    """One stream that is sent. Its beginning does not count: that fills buffers, and no line is as fast."""

    def __init__(self, meter: Meter) -> None:
        """Args:
        meter: of the line.
        """
        self._meter = meter
        self._counts = False
        self._bytes = 0
        self._began = 0.0

    def moved(self, size: int) -> None:
        """Bytes were handed over."""
        if self._meter.is_running:  # the buffers of one stream at least are full, and all share the line
            self._meter.moved(size)
        if self._counts:
            return
        now = time.monotonic()
        self._began = self._began or now
        self._bytes += size
        if self._bytes >= BUFFERED_BYTES or now - self._began >= BUFFERED_SECONDS:
            self._meter.begin()
            self._counts = True

    def pause(self) -> None:
        """Nothing is sent for now; buffers run empty."""
        if self._counts:
            self._meter.end()
        self._counts, self._bytes, self._began = False, 0, 0.0
