"""The key of a node: where it lies, who may use it, and which records it may sign."""

import dataclasses
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from model.errors import UserError
from swarm.identity import Identity, node_id_of, verify
from swarm.validator import MAX_LIFE_SECONDS, MAX_RECORD_BYTES, OwnedRecords, owner_of, record_validator


def openssh(key: rsa.RSAPublicKey | ed25519.Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


# the key


def test_node_id_is_libp2ps_id_of_the_same_file(identities: list[Identity]) -> None:
    for identity in identities:
        assert identity.path is not None
        assert identity.node_id == PeerID.from_identity(identity.path.read_bytes()).to_base58()


def test_a_key_that_hivemind_made_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    P2P.generate_identity(str(path))
    path.chmod(0o600)
    identity = Identity.open(path)
    assert identity.node_id == PeerID.from_identity(path.read_bytes()).to_base58()
    identity.close()


def test_a_new_key_is_private_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    write = os.fdopen

    def watched(descriptor: int, mode: str) -> object:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return write(descriptor, mode)

    monkeypatch.setattr(os, "fdopen", watched)
    before = os.umask(0)
    try:
        path = tmp_path / "home" / "identity"
        Identity.open(path).close()
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path], "nothing is left beside the key"


def test_the_key_stays_the_same(tmp_path: Path) -> None:
    nodes = set()
    for _ in range(2):
        identity = Identity.open(tmp_path / "identity")
        nodes.add(identity.node_id)
        identity.close()
    assert len(nodes) == 1


def test_a_key_in_use_is_refused_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    holder = Identity.open(path)
    with pytest.raises(UserError, match=r"another process uses this identity.*--home"):
        Identity.open(path)
    holder.close()
    Identity.open(path).close()


def test_a_key_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    Identity.open(path).close()
    hold = f"import fcntl; f = open({str(path)!r}); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UserError, match="another process"):
            Identity.open(path)
        other.communicate(b"\n")
    Identity.open(path).close()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity"
    Identity.open(path).close()
    path.chmod(mode)
    with pytest.raises(UserError, match=f"chmod 600 {path}"):
        Identity.open(path)
    path.chmod(0o600)
    Identity.open(path).close()


def private_file(key_type: int, data: bytes) -> bytes:
    return bytes(crypto_pb2.PrivateKey(key_type=key_type, data=data).SerializeToString())


def test_a_file_that_is_no_key_is_refused_and_released(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    other_kind = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    Identity.open(path).close()
    whole = path.read_bytes()
    for broken in (b"", b"not a key", whole[:-100], b"\x00" * 1000, private_file(0, b"x"), private_file(1, other_kind)):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"not an (RSA )?identity key.*Move it away") as refusal:
            Identity.open(path)
        assert "\n" not in str(refusal.value)
    path.write_bytes(whole)
    Identity.open(path).close()


def test_an_ephemeral_identity_has_no_file() -> None:
    identity = Identity.ephemeral()
    assert identity.path is None
    identity.close()


# signatures


def test_only_the_signer_of_the_message_verifies(identities: list[Identity]) -> None:
    alice, bob, _ = identities
    signature = alice.sign(b"message")
    assert verify(alice.public_key, b"message", signature)
    assert not verify(bob.public_key, b"message", signature)
    assert not verify(alice.public_key, b"massage", signature)
    assert not verify(alice.public_key, b"message", b"")
    assert not verify(alice.public_key, b"message", signature + b"\0")


def test_only_rsa_keys_of_a_sane_size_in_their_own_spelling_have_a_node_id(identities: list[Identity]) -> None:
    key = identities[0].public_key
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()
    other_kind = ed25519.Ed25519PrivateKey.generate().public_key()
    for bad in (b"", b"ssh-rsa", b"ssh-rsa AAAA", openssh(weak), openssh(other_kind), key + b" me@home", b"\xff" * 99):
        with pytest.raises(ValueError):
            node_id_of(bad)


# records in the DHT


def record(subkey: object, value: bytes = b"value", life: float = 30.0) -> DHTRecord:
    return DHTRecord(b"key", MSGPackSerializer.dumps(subkey), value, get_dht_time() + life)


def test_the_owner_of_a_sub_key_is_the_node_that_signs_it(identities: list[Identity]) -> None:
    for identity in identities:
        assert owner_of(record_validator(identity)[1]) == identity.node_id


def test_nothing_but_one_owner_mark_is_a_sub_key(identities: list[Identity]) -> None:
    _, mark = record_validator(identities[0])
    _, other = record_validator(identities[1])
    foreign = (
        None,
        1,
        "text",
        mark.decode(),
        b"",
        b"plain",
        mark[:-1],
        mark + other,
        b"x" + mark,
        mark + b"\n",
        [mark],
    )
    for subkey in foreign:
        with pytest.raises(ValueError):
            owner_of(subkey)
        assert not OwnedRecords().validate(record(subkey))
    assert not OwnedRecords().validate(record(b"[owner:ssh-rsa AAAA]"))


def test_plain_values_and_whole_dictionaries_are_refused() -> None:
    validator = OwnedRecords()
    for tag in (b"", b"dictionary", b"\xc1"):
        assert not validator.validate(DHTRecord(b"key", tag, b"value", get_dht_time() + 1))


def test_records_are_small_and_short_lived(identities: list[Identity]) -> None:
    _, mark = record_validator(identities[0])
    validator = OwnedRecords()
    assert validator.validate(record(mark, b"x" * MAX_RECORD_BYTES, MAX_LIFE_SECONDS - 1))
    assert not validator.validate(record(mark, b"x" * (MAX_RECORD_BYTES + 1)))
    assert not validator.validate(record(mark, life=MAX_LIFE_SECONDS + 1))
    assert not validator.validate(record(mark, life=10 * 365 * 86_400.0))


def test_only_the_owner_can_sign_for_its_sub_key(identities: list[Identity]) -> None:
    alice, mark = record_validator(identities[0])
    bob, _ = record_validator(identities[1])
    plain = record(mark)
    signed = dataclasses.replace(plain, value=alice.sign_value(plain))
    assert alice.validate(signed) and bob.validate(signed)
    assert bob.strip_value(signed) == b"value"
    forged = dataclasses.replace(plain, value=bob.sign_value(plain))
    for bad in (
        plain,
        forged,
        dataclasses.replace(signed, key=b"other"),
        dataclasses.replace(signed, value=b"x" + signed.value),
    ):
        assert not bob.validate(bad)
