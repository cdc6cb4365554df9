"""The manifest: everything that makes two nodes part of the same run."""

from typing import Literal, Self

from pydantic import Field, model_validator

from model.settings import LossSettings, ModelSettings, OptimizerSettings, Settings

PROTOCOL = 7
"""Version of the records, documents and calls between nodes; nodes with another one are refused."""

Encoding = Literal["fp32", "bf16", "int8", "int4"]
"""What travels of a shard: `fp32` its values; the others the change since the last commit, in that many bits."""

MAX_SHARDS = 4000
"""A commit names every shard, and has to stay below a megabyte and a half."""


class DataSettings(Settings):
    """The corpus: an ordered, seeded sequence of fixed-size token blocks."""

    source: Literal["builtin", "files", "own"] = "builtin"
    """`builtin`: CPython's own documentation text. `files`: one corpus that every node must have (checked by its
    fingerprint). `own`: each node brings its own text, block numbers count in that node's text."""
    tokenizer: str = Field(
        default="bytes", max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"
    )
    """`bytes`: UTF-8 bytes shifted by 3 (0 pad, 1 end of document, 2 unknown), the ids of ByT5. Else a name on the
    Hugging Face Hub, or of a folder; each node can say where its own copy is."""
    block_tokens: int = Field(gt=1, le=1_048_576)
    """Tokens that one block trains on; a block holds one more, the last target."""
    fingerprint: str = Field(default="", max_length=64)
    """SHA-256 of the token sequence, hexadecimal; filled in when the run is started. For `own` that of the tokenizer,
    empty for bytes."""
    num_blocks: int = Field(default=0, ge=0)
    """Training blocks in one epoch; filled in when the run is started, 0 for `own`."""


class RoundSettings(Settings):
    """The rhythm of the swarm."""

    total: int = Field(ge=0)
    """Rounds of the whole run; 0 trains until it is stopped."""
    local_steps: int = Field(gt=0, le=1_000_000)
    """Optimiser steps H between two synchronisations."""
    batch_blocks: int = Field(gt=0, le=65_536)
    """Blocks in one local step of one node."""
    heldout_blocks: int = Field(default=64, ge=0, le=65_536)
    """Held-out blocks that the swarm evaluates together at the start of a round; 0 turns the evaluation off."""
    owners_per_expert: int = Field(default=1, gt=0, le=4096)
    """Owners that an expert gets where the nodes have room for it: their updates are averaged."""
    outer_rate: float = Field(default=1.0, gt=0, le=1)
    """Part of the averaged change of a round that the new state takes over, for all shards; 1 for all of it. Less than
    that steadies what was trained apart, see docs/method.md."""
    overlap: bool = True
    """Whether nodes go on training while they synchronise; what they train meanwhile counts in the next round. See
    docs/encodings.md for what that costs."""
    commit_quorum: float = Field(default=0.0, ge=0, le=1)
    """Share of the last round's contributors without whom there is no commit. 0: whoever is left goes on, and of two
    halves that could not see each other the one with more tokens counts."""
    start_nodes: int = Field(default=1, gt=0, le=65_536)
    """Nodes that must be there before the first round is planned."""
    train_seconds: float = Field(gt=0)
    """Upper bound on the training part of a round; the real deadline follows from measured speed."""
    margin_seconds: float = Field(gt=0)
    """The most a dead, stopped or slow peer may cost a round beyond its measured length."""
    lease_seconds: float = Field(default=30.0, ge=2, le=120)
    """Life of a node record and of a lease; they are renewed five times in that span."""


class EncodingSettings(Settings):
    """How shards travel, for each kind of shard; what a lossy encoding leaves out is sent in later rounds."""

    shared: Encoding = "int8"
    """Of the shared shards, which every node trains and an average combines."""
    experts: Encoding = "int8"
    """Of the experts' shards, most of what travels."""


class MergeSettings(Settings):
    """The merging warm-up: early on, experts that resemble each other are drawn together (SPES, Eq. 5 and 6)."""

    alpha: float = Field(default=0.0, ge=0, le=1)
    """Strength at the first step; it falls linearly to 0. 0: nothing is ever merged."""
    every_steps: int = Field(default=500, gt=0)
    """Local steps M between two merges, a multiple of round.local_steps: experts are merged between two rounds."""
    first_steps: int = Field(default=12_500, gt=0)
    """Local steps T_merge after which the strength is 0 and the warm-up over."""
    donors: int = Field(default=4, gt=0)
    """Experts K that each one is drawn to; all others where there are fewer."""


class Manifest(Settings):
    """One training effort. Its canonical bytes, hashed, are the run's id; signed by `author`, they start the run."""

    protocol: int = PROTOCOL
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    author: str = Field(min_length=1, max_length=128)
    """Node id of who started the run."""
    seed: int = Field(ge=0, lt=2**63)
    """Seed of the genesis weights and of the order of the blocks."""
    initial_state: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """Digest of the state that the run begins with, where that is a checkpoint's; filled in when the run is started,
    empty for the random weights of `seed`. So runs that begin with other weights have other ids."""
    model: ModelSettings
    loss: LossSettings
    optimizer: OptimizerSettings
    data: DataSettings
    round: RoundSettings
    encoding: EncodingSettings = EncodingSettings()
    merge: MergeSettings = MergeSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.data.block_tokens > self.model.max_length:
            raise ValueError(
                f"data.block_tokens {self.data.block_tokens} exceeds model.max_length {self.model.max_length}"
            )
        shards = self.model.num_layers * (self.model.num_experts + 1)
        if shards > MAX_SHARDS:
            raise ValueError(f"{shards} shards (layers x (experts + 1)) are more than the {MAX_SHARDS} of a commit")
        if self.merge.alpha and self.merge.every_steps % self.round.local_steps:
            raise ValueError(
                f"merge.every_steps {self.merge.every_steps} is not a multiple of round.local_steps "
                f"{self.round.local_steps}: experts are merged between two rounds"
            )
        return self
