"""What a host's line does to what it carries."""

from dataclasses import dataclass

MOST_HOSTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A host's own line to all others, the same in both directions. Between two hosts the two lines add up."""

    delay_ms: float = 0.0
    """One way. Two hosts with 10 ms each have a round trip of 40 ms."""
    jitter_ms: float = 0.0
    """Each frame takes up to this much more or less, so frames overtake each other."""
    rate_mbit: float = 0.0
    """10^6 bit/s each way; 0 is no limit."""
    loss: float = 0.0
    """Part of the frames that is lost each way, 0 to 1."""

    def __post_init__(self) -> None:
        if min(self.delay_ms, self.jitter_ms, self.rate_mbit, self.loss) < 0 or self.loss > 1:
            raise ValueError(f"not a line: {self}")


def hardware_address(host: int) -> bytes:
    """The Ethernet address of a host, counted from 1: its number is in the last byte."""
    return bytes((2, 0, 0, 0, 0, host))
