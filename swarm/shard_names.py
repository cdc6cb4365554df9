"""The names of shards: `layer.3.expert.7` is an expert's, every other name a shared shard's."""

import re
from collections.abc import Collection, Iterable

_EXPERT = re.compile(r"layer\.\d+\.expert\.(\d+)")


def expert_of(name: str) -> int | None:
    """The expert a shard belongs to; None for a shared shard."""
    match = _EXPERT.fullmatch(name)
    return int(match[1]) if match else None


def trained(names: Iterable[str], experts: Collection[int]) -> list[str]:
    """The shards that the owner of these experts trains: all shared ones and its experts'."""
    return [name for name in names if (expert := expert_of(name)) is None or expert in experts]


def expert_shards(layer: int, experts: int) -> list[str]:
    """The shards of a layer's experts, by expert."""
    return [f"layer.{layer}.expert.{expert}" for expert in range(experts)]
