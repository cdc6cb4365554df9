"""When the experts of a run are merged, and how strongly: it follows from the manifest and the round alone."""

from typing import Literal, Self

import msgpack

from model.settings import Settings
from swarm.documents import Count, Part
from swarm.manifest import Manifest


class Warmup(Settings):
    """Where a run stands in its merging warm-up: what a few nodes keep in the DHT for everybody."""

    round: Count
    """Of the last commit."""
    phase: Literal["warmup", "steady"]
    alpha: Part
    """Strength of the next merge; 0 when there is none any more."""
    next_round: Count
    """The round that begins with it; 0 when there is none any more."""

    @classmethod
    def open(cls, value: bytes, manifest: Manifest) -> Self:
        """Read what a node has stored. Raises ValueError when it does not follow from the manifest."""
        told = cls.model_validate(msgpack.unpackb(value, use_list=False))
        if told != warmup(manifest, told.round):
            raise ValueError(f"the run does not stand like this after round {told.round}")
        return told


def warmup_key(run_id: str) -> str:
    """The DHT key of a run's phase."""
    return f"{run_id}.phase"


def strength(manifest: Manifest, number: int) -> float:
    """How strongly the state of round `number` is merged before the next round trains; 0 when it is not.

    It falls linearly over the local steps (SPES, section 3.3): alpha * (1 - step / first_steps), every `every_steps`.
    """
    merge, step = manifest.merge, number * manifest.round.local_steps
    if not number or step % merge.every_steps or step >= merge.first_steps:
        return 0.0
    return merge.alpha * (1 - step / merge.first_steps)


def warmup(manifest: Manifest, number: int) -> Warmup:
    """Where a run stands whose last commit is that of round `number`."""
    every, total = manifest.merge.every_steps // manifest.round.local_steps or 1, manifest.round.total
    after = max(every, -(-number // every) * every)
    alpha = strength(manifest, after)
    if not alpha or 0 < total <= after:
        return Warmup(round=number, phase="steady", alpha=0.0, next_round=0)
    return Warmup(round=number, phase="warmup", alpha=alpha, next_round=after + 1)
