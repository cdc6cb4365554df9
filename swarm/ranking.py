"""Rendezvous hashing: an order of nodes that every node computes alike and nobody can choose."""

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping


def score(node: str, *key: object) -> int:
    """The weight of a node for a key: 64 bits of a SHA-256 over both."""
    text = "\0".join([*map(str, key), node])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def ranked(nodes: Iterable[str], *key: object) -> list[str]:
    """The nodes in descending order of their score for the key; ties by id."""
    return sorted(nodes, key=lambda node: (-score(node, *key), node))


WEAK, STRONG = 0.6, 2.5
"""Measured rates of equal lines differ by so much from the usual: lower where a node's peers were busy with others, and
higher where buffers took what the line did not."""
UNKNOWN_RATE = 1.25e6
"""Bytes/s, 10 Mbit/s: a line that is slower than this shows it soon."""


def strengths(measured: Mapping[str, float]) -> dict[str, float]:
    """What is measured of each node, in bytes/s.

    Where it is 0 it is not known, and the median of the others is taken, or UNKNOWN_RATE if that is more. Where the
    difference from what is usual may be chance, the usual is taken.
    """
    known = [value for value in measured.values() if value > 0]
    unknown = max([statistics.median(known), UNKNOWN_RATE]) if known else UNKNOWN_RATE
    found = {node: value or unknown for node, value in measured.items()}
    usual = statistics.median(found.values()) if found else unknown
    return {node: usual if WEAK * usual <= value <= STRONG * usual else value for node, value in found.items()}


def ranked_by_strength(measured: Mapping[str, float], *key: object) -> list[str]:
    """The nodes in an order that puts each first for its share of all keys: weighted rendezvous hashing.

    Args:
        measured: strength of each node, see `strengths`.
        key: what the order is for.
    """
    strength = strengths(measured)

    def draw(node: str) -> float:
        # An exponential variate whose rate is the strength: the smallest is node i with probability s_i / sum(s).
        uniform = (score(node, *key) + 1) / 2**64
        return -math.log(uniform) / strength[node]

    return sorted(strength, key=lambda node: (draw(node), node))
