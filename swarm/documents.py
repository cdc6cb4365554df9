"""The signed documents of a run, their canonical bytes and their envelope.

A document is a frozen value. Its canonical form is msgpack of a map with sorted keys; the SHA-256 of that is its
digest. It travels deflated, which halves it, in an envelope with the signer's public key and the signature.
"""

import hashlib
import zlib
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgpack
from pydantic import Field, ValidationError

from model.settings import Settings
from swarm.identity import Identity, NodeId, node_id_of, verify
from swarm.manifest import Manifest

MAX_DOCUMENT_BYTES = 3 << 19
"""A unary call of hivemind carries less than 2 MiB."""
MAX_BODY_BYTES = 8 << 20
"""Of one document when it is inflated."""
_DOMAIN = b"spes-document/2\n"
"""What the signature covers besides the deflated body: a signature made for another purpose is never a document."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal."""
Node = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{46,64}$")]
ShardName = Annotated[str, Field(pattern=r"^[a-z0-9.]{1,64}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(gt=0, lt=2**63)]
"""Bytes of what can be fetched."""
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Nats = Annotated[float, Field(ge=0, le=1e15)]
Part = Annotated[float, Field(ge=0, le=1)]
Blocks = tuple[Count, Count]
"""Half-open range of block ids."""
Choices = tuple[tuple[Count, ...], ...]
"""How often each expert of each layer was chosen on held-out text, [L][E]; empty where that is not known."""


class ShardState(Settings):
    """What the commit says about one shard."""

    version: Count
    """Round that trained these values; a merge changes them and not their version."""
    digest: Digest
    """Of the values: little-endian fp32."""
    size: Size
    """Of the values."""


class Encoded(Settings):
    """Bytes that travel: a shard in the run's encoding, see `swarm.codec`."""

    digest: Digest
    size: Size


class Member(Settings):
    """What the plan asks of one roster member."""

    blocks: tuple[Blocks, ...]
    """Training blocks, in the order of use: those for `steps`, and with overlap those to go on with afterwards."""
    steps: Count
    """Local steps after which it hands in, fewer for a slow node."""
    heldout: Blocks
    """Held-out blocks to evaluate before training."""


class Merge(Settings):
    """How the experts are merged before a round trains."""

    alpha: Part
    """Strength."""
    donors: tuple[tuple[tuple[Count, ...], ...], ...]
    """For each layer and expert the experts that it is drawn to."""
    state: Digest
    """Of the merged model state, by which a node sees that it has merged as the leader has."""


class Document(Settings):
    """Base of what is signed during a run."""

    kind: str
    run: Digest


class Plan(Document):
    """What will be done in a round."""

    kind: Literal["plan"] = "plan"
    round: Count
    parent: Digest
    """Digest of the commit this round starts from."""
    leader: Node
    roster: dict[Node, Member]
    owners: dict[Node, tuple[Count, ...]]
    """Experts of each owner."""
    uplinks: dict[Node, Count]
    """Every node that holds the base, or is about to, and the bytes/s it can send as far as is known, 0 if not: who
    reduces what, and who passes results on to whom, follows from it."""
    train_seconds: Seconds
    """Training ends after this time whatever was reached, counted from the plan's arrival."""
    reduce_seconds: Seconds
    """After this further time the commit is written with what there is."""
    merge: Merge | None = None
    """Every node merges the state of the parent like this before anything else: the round's base is the result."""


class Contribution(Document):
    """What a node offers at the end of its training."""

    kind: Literal["contribution"] = "contribution"
    round: Count
    plan: Digest
    node: Node
    tokens: Count
    steps: Count
    used_blocks: Count
    """Blocks used, counted from the start of the plan's ranges."""
    loss: Nats
    """Mean training loss (cross-entropy, nats per token) over the steps."""
    heldout_nats: Nats
    heldout_tokens: Count
    choices: Choices = ()
    """On these tokens."""
    train_seconds: Seconds
    """From the plan to the end of the training that is handed in."""
    busy: Part
    """Share of the time since it last handed in that the node spent in training steps; 0 when that is not known."""
    shards: dict[ShardName, Encoded]


class Result(Settings):
    """The average of one shard."""

    encoded: Encoded
    """What everybody fetches."""
    values: Digest
    """Of the new values, as they are when `encoded` is applied to the state before."""
    contributors: tuple[Node, ...]


class Reduction(Document):
    """The results that one reducer has made so far in a round; a later one of the same node replaces it."""

    kind: Literal["reduction"] = "reduction"
    round: Count
    plan: Digest
    node: Node
    results: dict[ShardName, Result]


class Share(Settings):
    """What one node added to a round."""

    tokens: Count
    steps: Count


class Update(Settings):
    """How a shard came to its new values in a round."""

    encoded: Encoded
    reducer: Node
    without: tuple[Node, ...] = ()
    """Nodes whose share counted, but whose contribution to this shard did not: they keep their delta."""


class Ledger(Settings):
    """Where the swarm stands in the sequence of blocks."""

    cursor: Count = 0
    """First block that was never handed out."""
    returned: tuple[Blocks, ...] = ()
    """Blocks handed out to nodes that are gone and not used, in ascending order."""
    reserved: dict[Node, tuple[Blocks, ...]] = {}
    """Blocks handed to a node that it has not used yet; its next plan begins with them."""


class Commit(Document):
    """What was done in a round. Round 0 is the genesis."""

    kind: Literal["commit"] = "commit"
    round: Count
    parent: str
    """Digest of the commit before; empty for the genesis."""
    plan: str = ""
    """Digest of the plan that this commit fulfils; empty for the genesis."""
    leader: Node
    shards: dict[ShardName, ShardState]
    updates: dict[ShardName, Update]
    """Of the shards that changed; the others were carried."""
    owners: dict[Node, tuple[Count, ...]]
    shares: dict[Node, Share]
    """Nodes whose contribution counted."""
    missing: tuple[Node, ...]
    """Roster members whose contribution did not arrive."""
    tokens: Count
    """Tokens trained by the run so far."""
    ledger: Ledger
    loss: Nats
    """Token-weighted training loss of the round, nats per token."""
    heldout_loss: Nats | None
    """Nats per token on held-out text, of the state this round started from."""
    choices: Choices = ()
    """Of that state on that text."""
    train_seconds: Seconds
    """From the plan to the last contribution."""
    reduce_seconds: tuple[Seconds, ...]
    """From the last contribution to the commit, in this round and a few before it, this one last."""
    merge: Merge | None = None
    """How the state of the parent was merged before the round; the updates are those of the result."""
    busy: Part
    """Utilisation: the share of its time that a node spent in training steps, mean over the contributors; 0 where that
    is not known."""

    @property
    def state(self) -> str:
        """Digest of the whole model state: what every synchronised node reports."""
        return state_digest({name: shard.digest for name, shard in self.shards.items()})

    @property
    def carried(self) -> tuple[str, ...]:
        """Shards that kept the version they had."""
        return tuple(name for name, shard in self.shards.items() if shard.version < self.round)

    def counts(self, node: NodeId, name: str) -> bool:
        """Whether the new values of a shard contain what this node handed in."""
        return node in self.shares and name in self.updates and node not in self.updates[name].without

    @property
    def experts_covered(self) -> frozenset[int]:
        """Experts that had an owner in this round."""
        return frozenset(expert for experts in self.owners.values() for expert in experts)


class Leave(Document):
    """A node goes: nobody should wait for it."""

    kind: Literal["leave"] = "leave"
    node: Node
    round: Count
    moments: dict[ShardName, Encoded] = {}
    """The optimiser's moments of its experts, for those who train them next; it serves them for a little while."""


DOCUMENTS: dict[str, type[Document]] = {
    "plan": Plan,
    "contribution": Contribution,
    "reduction": Reduction,
    "commit": Commit,
    "leave": Leave,
}

D = TypeVar("D", bound=Settings)
D_co = TypeVar("D_co", bound=Settings, covariant=True)


class Rejected(ValueError):
    """Bytes from a peer that are not a valid document; says why."""


@dataclass(frozen=True, slots=True)
class Signed(Generic[D_co]):
    """A document whose signature holds."""

    document: D_co
    signer: NodeId
    digest: str
    wire: bytes
    """The envelope, as it is passed on."""


def canonical(value: Settings) -> bytes:
    """Canonical bytes of a settings value or document: msgpack, maps sorted by key."""
    return bytes(msgpack.packb(_sorted(value.model_dump()), use_bin_type=True))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


def digest_of(body: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(body).hexdigest()


def run_id_of(manifest: Manifest) -> str:
    """The id of a run: the digest of its manifest."""
    return digest_of(canonical(manifest))


def state_digest(digests: dict[str, str]) -> str:
    """Digest of a model state from the digests of its shards."""
    return digest_of("".join(f"{name}:{digests[name]}\n" for name in sorted(digests)).encode())


def seal(identity: Identity, document: D) -> Signed[D]:
    """Sign a document."""
    body = canonical(document)
    deflated = zlib.compress(body)
    envelope = {"body": deflated, "key": identity.public_key, "signature": identity.sign(_DOMAIN + deflated)}
    wire = bytes(msgpack.packb(envelope, use_bin_type=True))
    return Signed(document, identity.node_id, digest_of(body), wire)


def _open(wire: bytes) -> tuple[bytes, NodeId]:
    if len(wire) > MAX_DOCUMENT_BYTES:
        raise Rejected(f"{len(wire)} bytes, more than {MAX_DOCUMENT_BYTES}")
    try:
        envelope = msgpack.unpackb(wire)
        body, key, signature = envelope["body"], envelope["key"], envelope["signature"]
        if len(envelope) != 3 or not all(isinstance(part, bytes) for part in (body, key, signature)):
            raise Rejected("not an envelope")
        signer = node_id_of(key)
    except Rejected:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise Rejected("not an envelope") from error
    if not verify(key, _DOMAIN + body, signature):
        raise Rejected("the signature does not hold")
    return _inflate(body), signer


def _inflate(deflated: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(deflated, MAX_BODY_BYTES)
    except zlib.error as error:
        raise Rejected("the body is not deflated") from error
    if not inflater.eof or inflater.unused_data:
        raise Rejected(f"the body is cut short, goes on after its end, or has more than {MAX_BODY_BYTES} bytes")
    return body


def _parse(model: type[D], fields: object) -> D:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise Rejected(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(body, use_list=False)
    except (ValueError, TypeError) as error:
        raise Rejected("the body is not msgpack") from error
    if not isinstance(fields, dict):
        raise Rejected("the body is not a map")
    return fields


def open_manifest(wire: bytes) -> Signed[Manifest]:
    """Check and read a manifest's envelope. Raises Rejected."""
    body, signer = _open(wire)
    manifest = _parse(Manifest, _fields(body))
    if manifest.author != signer:
        raise Rejected("the manifest is not signed by its author")
    return Signed(manifest, signer, digest_of(body), wire)


def open_document(wire: bytes, run_id: str) -> Signed[Document]:
    """Check and read the envelope of one of the run's documents. Raises Rejected."""
    body, signer = _open(wire)
    fields = _fields(body)
    model = DOCUMENTS.get(str(fields.get("kind")))
    if model is None:
        raise Rejected(f"unknown kind {fields.get('kind')!r}")
    document = _parse(model, fields)
    if document.run != run_id:
        raise Rejected("it belongs to another run")
    if canonical(document) != body:
        raise Rejected("its bytes are not in canonical form")
    author = getattr(document, "leader", None) or getattr(document, "node", None)
    if author != signer:
        raise Rejected("it is not signed by the node it names")
    return Signed(document, signer, digest_of(body), wire)
