"""Which DHT records a node stores, forwards and believes.

hivemind's signature validator lets everything through that carries no owner mark, so a stranger could replace a
signed record by a plain one. Here every record must be a sub-key owned by its signer, small, and short-lived.
"""

import re

import msgpack
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.utils import get_dht_time

from swarm.identity import Identity, NodeId, node_id_of

MAX_RECORD_BYTES = 16 << 10
"""Largest value of a record, with its signature: that of a node that holds all experts of a model with 4096."""

MAX_LIFE_SECONDS = 123.0
"""Longest life of a record: the longest lease, plus the clock difference that hivemind tolerates."""

_OWNER = re.compile(rb"\[owner:(ssh-rsa [A-Za-z0-9+/=]{1,2048})\]")


def owner_of(subkey: object) -> NodeId:
    """The node id that a record's sub-key belongs to. Raises ValueError when it is not exactly one owner mark."""
    match = _OWNER.fullmatch(subkey) if isinstance(subkey, bytes) else None
    if match is None:
        raise ValueError("the sub-key is not an owner mark")
    return node_id_of(match[1])


class OwnedRecords(RecordValidatorBase):
    """Refuses every record that is not a small, short-lived sub-key with an owner mark."""

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record may be stored or believed, apart from its signature."""
        if len(record.value) > MAX_RECORD_BYTES or len(record.subkey) > MAX_RECORD_BYTES:
            return False
        if record.expiration_time > get_dht_time() + MAX_LIFE_SECONDS:
            return False
        try:
            owner_of(msgpack.unpackb(record.subkey))
        except ValueError:  # msgpack's own errors are ValueErrors too
            return False
        return True

    @property
    def priority(self) -> int:
        """Above the signature validator's: a large value is refused before it is hashed."""
        return 20


def record_validator(identity: Identity) -> tuple[CompositeValidator, bytes]:
    """The validator of a node's DHT and the sub-key under which this identity may store."""
    signatures = RSASignatureValidator(identity.key)
    return CompositeValidator([signatures, OwnedRecords()]), signatures.local_public_key
