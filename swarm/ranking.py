"""Rendezvous hashing: an order of nodes that every node computes alike and nobody can choose."""

import hashlib
from collections.abc import Iterable


def score(node: str, *key: object) -> int:
    """The weight of a node for a key: 64 bits of a SHA-256 over both."""
    text = "\0".join([*map(str, key), node])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def ranked(nodes: Iterable[str], *key: object) -> list[str]:
    """The nodes in descending order of their score for the key; ties by id."""
    return sorted(nodes, key=lambda node: (-score(node, *key), node))
