"""Documents: what is sealed opens again, and nothing else ever does."""

import math
import tracemalloc
import zlib
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.documents import (
    DOCUMENTS,
    MAX_BODY_BYTES,
    MAX_DOCUMENT_BYTES,
    Document,
    Encoded,
    Leave,
    Ledger,
    Member,
    Rejected,
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
from tests import examples
from tests.examples import RUN

DIGEST = examples.digest("something")


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
    values = Encoded(digest=DIGEST, size=16)
    return {
        "plan": examples.plan(
            me,
            other,
            roster={
                me: Member(blocks=((0, 4), (9, 12)), steps=4, heldout=(0, 32)),
                other: Member(blocks=(), steps=1, heldout=(32, 64)),
            },
            owners={me: (0, 2), other: (1,)},
            uplinks={me: 0, other: 1 << 20},
        ),
        "contribution": examples.contribution(me, busy=0.75, shards={"embed": values, "layer.0.expert.2": values}),
        "reduction": examples.reduction(me, results={"embed": examples.result("new", me, other)}),
        "commit": examples.commit(
            round=1,
            parent=DIGEST,
            plan=DIGEST,
            leader=me,
            shards=examples.states({"embed": b"values"}, version=1),
            updates={"embed": examples.update(me, b"change", without=(other,))},
            owners={me: (0, 2), other: (1,)},
            shares={me: Share(tokens=100, steps=4)},
            missing=(other,),
            tokens=100,
            ledger=Ledger(cursor=12, returned=((7, 9),), reserved={other: ((4, 5), (6, 7))}),
            heldout_loss=None,
            reduce_seconds=(0.5, 0.25),
        ),
        "leave": Leave(run=RUN, node=me, round=3, moments={"layer.0.expert.2": values}),
    }


def sign(identity: Identity, fields: object) -> bytes:
    """The envelope of anything, with a signature that holds; a map has its keys in canonical order."""
    body = bytes(msgpack.packb(dict(sorted(fields.items(), key=str)) if isinstance(fields, dict) else fields))
    return enclose(identity, zlib.compress(body))


def enclose(identity: Identity, deflated: bytes) -> bytes:
    """The envelope of any bytes, with a signature that holds."""
    signature = identity.sign(b"spes-document/2\n" + deflated)
    return bytes(msgpack.packb({"body": deflated, "key": identity.public_key, "signature": signature}))


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
    body = zlib.compress(canonical(documents["leave"]))
    envelope = {"body": body, "key": alice.public_key, "signature": alice.sign(body)}
    with pytest.raises(Rejected, match="signature does not hold"):
        open_document(bytes(msgpack.packb(envelope)), RUN)


def test_an_oversized_document_is_rejected_unread(alice: Identity) -> None:
    with pytest.raises(Rejected, match="more than"):
        open_document(enclose(alice, b"x" * MAX_DOCUMENT_BYTES), RUN)


@pytest.mark.parametrize("where", ["", "far "])
def test_a_body_that_inflates_without_end_is_rejected(alice: Identity, where: str) -> None:
    size = MAX_BODY_BYTES + (100 << 20 if where else 1)
    bomb = enclose(alice, zlib.compress(bytes(size)))
    assert len(bomb) < MAX_DOCUMENT_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(Rejected, match="more than"):
            open_document(bomb, RUN)
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_BODY_BYTES
    finally:
        tracemalloc.stop()


def test_a_body_is_one_deflated_stream_and_nothing_else(documents: dict[str, Document], alice: Identity) -> None:
    """Else one document could be hidden behind another."""
    body = canonical(documents["leave"])
    deflated = zlib.compress(body)
    assert open_document(enclose(alice, deflated), RUN).document == documents["leave"]
    for wrong in (body, deflated[:-1], deflated + b"x", deflated + deflated, b""):
        with pytest.raises(Rejected, match="body"):
            open_document(enclose(alice, wrong), RUN)


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
        ("busy", 1.01),
        ("shards", {"../embed": {"digest": DIGEST, "size": 16}}),
        ("shards", {"embed": {"digest": "../" + DIGEST, "size": 16}}),
        ("shards", {"embed": {"digest": DIGEST, "size": -1}}),
        ("shards", {"embed": DIGEST}),
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
    with pytest.raises(Rejected, match="canonical"):
        open_document(enclose(alice, zlib.compress(body)), RUN)
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
    for opens in (open_manifest, lambda wire: open_document(wire, RUN)):
        with pytest.raises(Rejected):
            opens(enclose(alice, zlib.compress(body)))


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


def test_a_commit_says_which_shards_have_changed_and_who_is_in_them() -> None:
    ann, ben, cat = examples.NODES[:3]
    shards = examples.states({"embed": b"new"}, version=2) | examples.states({"head": b"old"}, version=1)
    commit = examples.commit(
        round=2,
        shards=shards,
        updates={"embed": examples.update(ann, without=(ben,))},
        shares={node: Share(tokens=1, steps=1) for node in (ann, ben)},
    )
    assert commit.carried == ("head",)
    assert commit.counts(ann, "embed")
    assert not commit.counts(ben, "embed"), "its contribution to this shard did not come"
    assert not commit.counts(cat, "embed"), "it has no share"
    assert not commit.counts(ann, "head"), "it is carried"
