"""From a trainer's snapshot to what a node hands in: each shard in the run's encoding, in files named by digest."""

import os
from pathlib import Path

from swarm import codec
from swarm.documents import Commit, Encoded
from swarm.manifest import Encoding, EncodingSettings
from swarm.residuals import Residuals
from swarm.shard_names import expert_of
from swarm.store import HashingFile, ShardStore
from swarm.trainer import Work


def encoding_of(settings: EncodingSettings, name: str) -> Encoding:
    """How a shard travels in this run."""
    return settings.shared if expert_of(name) is None else settings.experts


class Contributor:
    """Encodes what this node has trained in one round."""

    def __init__(
        self, settings: EncodingSettings, base: Commit, store: ShardStore, residuals: Residuals, folder: Path
    ) -> None:
        """Args:
        settings: encoding by kind of shard.
        base: what the round starts from.
        store: has the values of the base and of the snapshot.
        residuals: what was rounded away before.
        folder: takes the encoded shards; this node's alone, and gone some rounds later.
        """
        self._settings = settings
        self._base = base
        self._store = store
        self._residuals = residuals
        self._folder = folder

    def encode(self, work: Work) -> dict[str, Encoded]:
        """Encode every trained shard; this reads and writes files, so it belongs into a thread.

        Raises FloatingPointError when a shard holds values that are no numbers, or has changed beyond all measure: it
        must not be handed in.
        """
        return {name: self._encode(name, self._store.locate(digest)) for name, digest in work.shards.items()}

    def _encode(self, name: str, snapshot: Path) -> Encoded:
        encoding, size = encoding_of(self._settings, name), self._base.shards[name].size
        if codec.carries_values(encoding):
            if not codec.is_finite("fp32", snapshot):
                raise FloatingPointError(f"{name} holds values that are no numbers")
            return Encoded(digest=snapshot.name, size=size)
        temporary = self._folder / f".handed-in.{name}.part"
        with open(temporary, "wb") as file:
            target = HashingFile(file)
            codec.contribute(
                encoding,
                snapshot,
                self._store.locate(self._base.shards[name].digest),
                self._residuals.find("handed-in", name),
                target,
                self._rest(name),
            )
        final = self._folder / target.digest
        os.replace(temporary, final)
        self._store.place(final)
        return Encoded(digest=target.digest, size=codec.encoded_size(encoding, size // 4))

    def _rest(self, name: str) -> Path:
        """What this contribution rounds away, until it is known whether it counted."""
        return self._folder / f".handed-in.{name}"

    def settle(self, commit: Commit, me: str, work: Work) -> None:
        """Keep what was rounded away from the contributions that the commit contains."""
        if not work.shards:  # nothing was handed in, so what was rounded away before is still to be sent
            return
        self._residuals.keep_only("handed-in", set(work.shards))
        for name in work.shards:
            if commit.counts(me, name) and self._rest(name).exists():
                self._residuals.replace("handed-in", name, self._rest(name))
