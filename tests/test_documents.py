"""Documents: what is sealed opens again, and nothing else ever does."""

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.documents import (
    DOCUMENTS,
    MAX_DOCUMENT_BYTES,
    Commit,
    Contribution,
    Document,
    Leave,
    Ledger,
    Member,
    Plan,
    Reduction,
    Rejected,
    Result,
    ShardState,
    Share,
    canonical,
    digest_of,
    open_document,
    open_manifest,
    run_id_of,
    seal,
)
from swarm.identity import Identity
from swarm.manifest import Manifest

RUN = "ab" * 32
DIGEST = "cd" * 32


@pytest.fixture(scope="session")
def alice(identities: list[Identity]) -> Identity:
    return identities[0]


@pytest.fixture(scope="session")
def bob(identities: list[Identity]) -> Identity:
    return identities[1]


@pytest.fixture(scope="session")
def documents(alice: Identity, bob: Identity) -> dict[str, Document]:
    """One document of every kind, by Alice."""
    me, other = alice.node_id, bob.node_id
    return {
        "plan": Plan(
            run=RUN,
            round=1,
            parent=DIGEST,
            leader=me,
            roster={me: Member(blocks=((0, 4), (9, 12)), heldout=(0, 32)), other: Member(blocks=(), heldout=(32, 64))},
            owners={me: (0, 2), other: (1,)},
            local_steps=4,
            train_seconds=30.0,
            reduce_seconds=5.0,
        ),
        "contribution": Contribution(
            run=RUN,
            round=1,
            plan=DIGEST,
            node=me,
            tokens=100,
            steps=4,
            used_blocks=7,
            loss=5.5,
            heldout_nats=12.25,
            heldout_tokens=3,
            train_seconds=1.5,
            shards={"embed": DIGEST, "layer.0.expert.2": RUN},
        ),
        "reduction": Reduction(
            run=RUN, round=1, plan=DIGEST, node=me, results={"embed": Result(digest=DIGEST, contributors=(me, other))}
        ),
        "commit": Commit(
            run=RUN,
            round=1,
            parent=DIGEST,
            leader=me,
            shards={"embed": ShardState(version=1, digest=DIGEST, size=16)},
            holders={"embed": me},
            owners={me: (0, 2), other: (1,)},
            shares={me: Share(tokens=100, steps=4)},
            missing=(other,),
            tokens=100,
            ledger=Ledger(cursor=12, returned=((7, 9),)),
            loss=5.5,
            heldout_loss=None,
            train_seconds=1.5,
            reduce_seconds=0.5,
        ),
        "leave": Leave(run=RUN, node=me, round=3),
    }


def sign(identity: Identity, fields: object) -> bytes:
    """The envelope of anything, with a signature that holds; a map has its keys in canonical order."""
    body = bytes(msgpack.packb(dict(sorted(fields.items(), key=str)) if isinstance(fields, dict) else fields))
    signature = identity.sign(b"spes-document/1\n" + body)
    return bytes(msgpack.packb({"body": body, "key": identity.public_key, "signature": signature}))


def test_there_is_a_sample_of_every_kind(documents: dict[str, Document]) -> None:
    assert documents.keys() == DOCUMENTS.keys()


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_what_is_sealed_opens_as_it_was(documents: dict[str, Document], alice: Identity, kind: str) -> None:
    sealed = seal(alice, documents[kind])
    opened = open_document(sealed.wire, RUN)
    assert opened == sealed
    assert opened.document == documents[kind] and type(opened.document) is DOCUMENTS[kind]
    assert opened.digest == digest_of(canonical(documents[kind]))


def test_a_manifest_opens_and_its_digest_is_the_run(small_manifest: Manifest, alice: Identity) -> None:
    sealed = seal(alice, small_manifest)
    assert open_manifest(sealed.wire) == sealed
    assert sealed.digest == run_id_of(small_manifest)


def test_canonical_bytes_do_not_depend_on_the_order_of_keys(documents: dict[str, Document]) -> None:
    for document in documents.values():
        fields = document.model_dump()
        turned = {
            name: dict(reversed(value.items())) if isinstance(value, dict) else value
            for name, value in reversed(fields.items())
        }
        assert canonical(type(document).model_validate(turned)) == canonical(document)


def test_one_flipped_bit_anywhere_is_rejected(documents: dict[str, Document], alice: Identity) -> None:
    wire = seal(alice, documents["leave"]).wire
    accepted = []
    for bit in range(8 * len(wire)):
        damaged = bytearray(wire)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            open_document(bytes(damaged), RUN)
            accepted.append(bit)
        except Rejected:
            pass
    assert not accepted


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_is_only_valid_from_the_node_it_names(
    documents: dict[str, Document], bob: Identity, kind: str
) -> None:
    with pytest.raises(Rejected, match="not signed by the node it names"):
        open_document(seal(bob, documents[kind]).wire, RUN)


def test_a_manifest_is_only_valid_from_its_author(small_manifest: Manifest, bob: Identity) -> None:
    with pytest.raises(Rejected, match="not signed by its author"):
        open_manifest(seal(bob, small_manifest).wire)


def test_a_document_of_another_run_is_rejected(documents: dict[str, Document], alice: Identity) -> None:
    with pytest.raises(Rejected, match="another run"):
        open_document(seal(alice, documents["plan"]).wire, DIGEST)


def test_a_signature_made_for_something_else_is_rejected(documents: dict[str, Document], alice: Identity) -> None:
    body = canonical(documents["leave"])
    envelope = {"body": body, "key": alice.public_key, "signature": alice.sign(body)}
    with pytest.raises(Rejected, match="signature does not hold"):
        open_document(bytes(msgpack.packb(envelope)), RUN)


def test_an_oversized_document_is_rejected_unread(alice: Identity) -> None:
    with pytest.raises(Rejected, match="more than"):
        open_document(sign(alice, b"x" * MAX_DOCUMENT_BYTES), RUN)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", math.nan),
        ("loss", math.inf),
        ("loss", "5.5"),
        ("tokens", -1),
        ("tokens", 2**63),
        ("tokens", 1.0),
        ("tokens", True),
        ("plan", DIGEST.upper()),
        ("plan", DIGEST + "\n"),
        ("node", "../../etc/passwd"),
        ("shards", {"../embed": DIGEST}),
        ("shards", {"embed": "../" + DIGEST}),
        ("shards", [DIGEST]),
        ("surprise", 1),
        ("kind", "commit"),
        ("kind", "manifest"),
        ("kind", None),
    ],
)
def test_a_signed_document_with_a_wrong_field_is_rejected(
    documents: dict[str, Document], alice: Identity, name: str, value: object
) -> None:
    fields = documents["contribution"].model_dump()
    assert open_document(sign(alice, fields), RUN).document == documents["contribution"]
    with pytest.raises(Rejected):
        open_document(sign(alice, {**fields, name: value}), RUN)


def test_another_form_of_the_same_document_is_rejected(documents: dict[str, Document], alice: Identity) -> None:
    """A document has one digest, so it may have only one form."""
    fields = documents["contribution"].model_dump()
    body = bytes(msgpack.packb(dict(sorted(fields.items(), reverse=True))))
    envelope = {"body": body, "key": alice.public_key, "signature": alice.sign(b"spes-document/1\n" + body)}
    with pytest.raises(Rejected, match="canonical"):
        open_document(bytes(msgpack.packb(envelope)), RUN)
    with pytest.raises(Rejected, match="canonical"):
        open_document(sign(alice, {**fields, "train_seconds": 1}), RUN)


def test_a_missing_field_is_rejected_by_name(documents: dict[str, Document], alice: Identity) -> None:
    fields = documents["leave"].model_dump()
    del fields["node"]
    with pytest.raises(Rejected, match="node"):
        open_document(sign(alice, fields), RUN)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x81", b"\x81\xa1a", b"\xdf\xff\xff\xff\xff", b"\x01", b"\x90", b"\x80\x80"]
)
def test_a_signed_body_that_is_no_map_is_rejected(alice: Identity, body: bytes) -> None:
    envelope = {"body": body, "key": alice.public_key, "signature": alice.sign(b"spes-document/1\n" + body)}
    for opens in (open_manifest, lambda wire: open_document(wire, RUN)):
        with pytest.raises(Rejected):
            opens(bytes(msgpack.packb(envelope)))


@pytest.mark.parametrize(
    "change", [{"extra": b""}, {"signature": "text"}, {"key": b"ssh-rsa AAAA"}, {"key": None}, {"body": {}}]
)
def test_another_envelope_is_rejected(documents: dict[str, Document], alice: Identity, change: dict[str, Any]) -> None:
    envelope = msgpack.unpackb(seal(alice, documents["leave"]).wire)
    with pytest.raises(Rejected):
        open_document(bytes(msgpack.packb({**envelope, **change})), RUN)


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_rejected(wire: bytes) -> None:
    for opens in (open_manifest, lambda wire: open_document(wire, RUN)):
        with pytest.raises(Rejected):
            opens(wire)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9) | st.binary(max_size=9), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values, st.sampled_from(sorted(DOCUMENTS)), st.data())
@settings(max_examples=50, deadline=None)
def test_any_signed_value_raises_nothing_but_rejected(
    alice: Identity, documents: dict[str, Document], value: object, kind: str, data: st.DataObject
) -> None:
    fields = documents[kind].model_dump()
    changed = {**fields, data.draw(st.sampled_from(sorted(fields))): value}
    for body in (value, changed, {**changed, "kind": kind}):
        try:
            opened = open_document(sign(alice, body), RUN)
        except Rejected:
            continue
        assert open_document(seal(alice, opened.document).wire, RUN).document == opened.document


@given(values)
def test_any_envelope_raises_nothing_but_rejected(value: object) -> None:
    with pytest.raises(Rejected):
        open_document(bytes(msgpack.packb(value)), RUN)
