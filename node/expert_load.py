"""How busy the experts are, from what the routers chose on held-out text."""

from collections.abc import Sequence

DEAD = 0.1
"""An expert with less than this part of an even share is dead: its layer does without it."""


def shares(choices: Sequence[Sequence[int]]) -> list[list[float]]:
    """The share of each expert in the choices of its layer, [L][E]; 1 / E is an even share."""
    return [[count / total for count in layer] if (total := sum(layer)) else [0.0] * len(layer) for layer in choices]


def dead(choices: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Layer and id of each dead expert."""
    return [
        (layer, expert)
        for layer, row in enumerate(shares(choices))
        for expert, share in enumerate(row)
        if share < DEAD / len(row)
    ]
