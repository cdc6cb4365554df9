"""The key of a node: one RSA key is its libp2p identity, signs its DHT records and its documents."""

import base64
import fcntl
import hashlib
import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import Self, TypeAlias

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from model.errors import UserError

NodeId: TypeAlias = str
"""A libp2p peer id in base58; it is the hash of the node's public key."""


def short(node: NodeId) -> str:
    """The end of a node id, enough to tell nodes apart."""
    return f"...{node[-6:]}"


@lru_cache(maxsize=4096)
def node_id_of(public_key: bytes) -> NodeId:
    """The node id that belongs to an RSA public key in OpenSSH form.

    The libp2p rule: the SHA-256 multihash of the key as a protobuf message. Raises ValueError for anything that is
    not an RSA key of 2,048 to 8,192 bits in the one form that OpenSSH writes, so that a node has one key and one id.
    """
    try:
        key = serialization.load_ssh_public_key(public_key)
    except (UnsupportedAlgorithm, ValueError) as error:
        raise ValueError("not a public key in OpenSSH form") from error
    if not isinstance(key, rsa.RSAPublicKey) or not 2048 <= key.key_size <= 8192:
        raise ValueError("not an RSA key of 2,048 to 8,192 bits")
    if key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) != public_key:
        raise ValueError("a public key in another spelling than OpenSSH's own")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    return NodeId(PeerID(b"\x12\x20" + hashlib.sha256(message).digest()).to_base58())


@lru_cache(maxsize=4096)
def _public_key(public_key: bytes) -> RSAPublicKey:
    return RSAPublicKey.from_bytes(public_key)


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` over `message` was made with the private half of `public_key`."""
    return bool(_public_key(public_key).verify(message, base64.b64encode(signature)))


class Identity:
    """A node's private key, loaded and locked: no other process of this box can use it at the same time."""

    def __init__(self, key: RSAPrivateKey, path: Path | None = None, lock: int | None = None) -> None:
        self.key = key
        self.path = path
        self._lock = lock
        self.public_key: bytes = key.get_public_key().to_bytes()
        self.node_id = node_id_of(self.public_key)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Load the key at `path`, or create it (mode 0600).

        Raises UserError when the file is readable by others, is not such a key, or is in use by another process.
        """
        if not path.exists():
            _create(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
                raise UserError(f"{path}: the identity key is readable by others. Run: chmod 600 {path}")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{path}: another process uses this identity. Stop it, or give this node its own folder: --home DIR"
                ) from None
            return cls(_load(path), path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def read(cls, path: Path) -> Self:
        """The key at `path`, which a daemon may be using: to look at. Raises UserError when it is not such a key."""
        if not path.exists():
            raise UserError(f"{path}: there is no identity yet; the first start of a node makes one")
        return cls(_load(path), path)

    @classmethod
    def ephemeral(cls) -> Self:
        """A new key that is never written anywhere, for commands that only read the swarm."""
        return cls(RSAPrivateKey())

    def sign(self, message: bytes) -> bytes:
        """RSA-PSS signature with SHA-256."""
        return base64.b64decode(self.key.sign(message))  # raw: base64 spells the same bytes in several ways

    def close(self) -> None:
        """Release the lock on the key file."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _create(path: Path) -> None:
    """Write a new key in the protobuf form that libp2p reads."""
    der = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    write_secret(path, crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString())


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, unless it is there already; the mode is set before the first byte is
    written. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)  # unlike rename, link never replaces what another process has just made
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def _load(path: Path) -> RSAPrivateKey:
    try:
        message = crypto_pb2.PrivateKey.FromString(path.read_bytes())
        private = serialization.load_der_private_key(message.data, password=None)
    except Exception as error:  # noqa: BLE001 - protobuf and cryptography share no base class for a broken file
        raise UserError(f"{path}: not an identity key ({error}). Move it away; a new one is made") from None
    if not isinstance(private, rsa.RSAPrivateKey):
        raise UserError(f"{path}: not an RSA identity key. Move it away; a new one is made")
    key = RSAPrivateKey.__new__(RSAPrivateKey)  # its constructor would spend a second on another key
    key._private_key = private
    return key
