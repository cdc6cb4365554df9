"""A node's place in the network: p2pd, the DHT and the address book, all in the daemon's own event loop."""

import asyncio
import json
import logging
import math
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.p2p import P2P, PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from model.errors import ClockOff, SpesError, Unreachable, UserError
from swarm import decoder_guard
from swarm.identity import Identity, NodeId
from swarm.p2p_daemon import P2PDaemon, WrongPeer
from swarm.validator import owner_of, record_validator

PROBE_SECONDS = 5.0
"""How long one given address may take to accept a connection."""

DHT_WAIT_SECONDS = 3.0
"""After this time without an answer a DHT request counts as lost."""

CALL_SECONDS = 10.0
"""Bound on one DHT operation and on one dial."""

QUICK_SECONDS = 1.0
"""What does not come within this time is not worth waiting for where a later look will bring it."""
CLOSE_SECONDS = 5.0
REDIAL_FIRST_SECONDS = 2.0
REDIAL_MOST_SECONDS = 15.0
BEAM = 8
"""Peers that are asked who is nearest to a key, until that changes no more: five of them keep what is under it."""
MAX_BOOK = 1024
"""Peers kept in the address book."""

UNDIALLED = "peers cannot dial this node"
DIAL_REMEDY = "forward the port of --listen, and name it with --announce"

log = logging.getLogger(__name__)


def configure_hivemind() -> None:
    """Guard hivemind's decoder and send its log records through the program's own handlers."""
    decoder_guard.install()
    use_hivemind_log_handler("nowhere")


def peer_of(address: str) -> NodeId:
    """The node id at the end of a multiaddress `/ip4/1.2.3.4/tcp/31337/p2p/ID`. Raises UserError when it has none."""
    try:
        multiaddr = Multiaddr(address)
        peer = multiaddr["p2p"]
        PeerID.from_base58(peer)
        _endpoint(address)
    except Exception:  # noqa: BLE001 - the multiaddress parser raises whatever its parts raise
        raise UserError(
            f"{address}: not a peer address. It looks like /ip4/203.0.113.5/tcp/31337/p2p/Qm...; "
            "copy the whole join line that `spes-node bootstrap` printed"
        ) from None
    return NodeId(peer)


def _endpoint(address: str) -> tuple[str, int]:
    """Host and port of a multiaddress. Raises ValueError."""
    parts = address.split("/")
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6", "dns", "dns4", "dns6") or parts[3] != "tcp":
        raise ValueError(address)
    return parts[2], int(parts[4])


async def probe(address: str) -> str:
    """Try to open a connection to an address; returns the empty string, or why it failed."""
    host, port = _endpoint(address)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {PROBE_SECONDS:.0f} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    writer.close()
    return ""


def check_ports(listen: Sequence[str]) -> None:
    """Raise UserError when a port is taken: p2pd would go on without it and be unreachable."""
    for address in listen:
        host, port = _endpoint(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                attempt.bind((host, port))
            except OSError as error:
                raise UserError(
                    f"cannot listen on {host}:{port} ({(error.strerror or str(error)).lower()}). "
                    "Choose another address: --listen HOST:PORT"
                ) from None


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as the DHT has it."""

    value: bytes
    until: float
    """When it ends, by the DHT's clock."""

    @property
    def is_live(self) -> bool:
        """Whether it has not ended yet."""
        return float(get_dht_time()) < self.until


@dataclass(slots=True)
class Contact:
    """A peer in the address book."""

    addresses: tuple[str, ...]
    tries: int = 0
    next_try: float = 0.0


@dataclass(slots=True)
class AddressBook:
    """Every peer ever seen, kept on disk: hivemind's DHT does not find its way back after a long cut by itself."""

    path: Path | None
    contacts: dict[NodeId, Contact] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """Read the book; one that is missing or damaged is an empty one, since peers fill it again."""
        book = cls(path)
        if path is not None and path.exists():
            try:
                for address in json.loads(path.read_text()):
                    book._add(peer_of(address), address)
            except (ValueError, TypeError, UserError) as error:
                log.warning("address book %s is damaged (%s); starting a new one", path, error)
        return book

    def _add(self, node: NodeId, address: str) -> None:
        known = self.contacts.get(node)
        addresses = (*known.addresses, address) if known else (address,)
        self.contacts[node] = Contact(addresses[-4:])

    def update(self, seen: Mapping[NodeId, Sequence[str]]) -> None:
        """Remember the addresses of live peers; the newest stand last, the book is cut at MAX_BOOK."""
        before = self.addresses()
        for node, addresses in seen.items():
            if addresses:
                known = self.contacts.pop(node, None)
                if known is None or known.addresses != tuple(addresses):
                    known = Contact(tuple(addresses))
                self.contacts[node] = known
        while len(self.contacts) > MAX_BOOK:
            del self.contacts[next(iter(self.contacts))]
        after = self.addresses()
        if self.path is not None and sorted(after) != sorted(before):
            temporary = self.path.with_name(f".{self.path.name}.new")
            temporary.write_text(json.dumps(after))
            os.replace(temporary, self.path)

    def addresses(self) -> list[str]:
        """All addresses, each with its peer id."""
        return [address for contact in self.contacts.values() for address in contact.addresses]


class Network:
    """One peer: `p2p` for calls, the DHT for records. Everything awaits with a bound."""

    def __init__(self, identity: Identity, daemon: P2PDaemon, dht: DHTNode, subkey: bytes, book: AddressBook) -> None:
        self.identity = identity
        self.node_id = identity.node_id
        self.book = book
        self.is_dialled = True
        """Whether the peers that this node started from could dial it back, as they say."""
        self._daemon = daemon
        self._dht = dht
        self._subkey = subkey

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        peers: Sequence[str] = (),
        book_path: Path | None = None,
        client: bool = False,
    ) -> Self:
        """Start p2pd and join the DHT.

        Args:
            identity: the node's key; without a file the libp2p id differs from the node id, which only reading
                commands may do.
            listen, announce: multiaddresses, see `P2PDaemon.start`.
            peers: addresses of peers; one that answers is enough. Known peers from the address book are tried too.
            book_path: file of the address book.
            client: read the swarm without serving it.

        Raises:
            UserError: an address is malformed, or the port is in use.
            Unreachable: peers were given and none answers; says why for each.
        """
        configure_hivemind()
        book = AddressBook.load(book_path)
        given, known = (
            [address for address in addresses if peer_of(address) != identity.node_id]
            for addresses in (peers, book.addresses())
        )
        check_ports(listen)
        daemon, alive = await _start_daemon(
            given, known, listen=listen, announce=announce, identity_path=identity.path, client=client
        )
        validator, subkey = record_validator(identity)
        try:
            dht = await DHTNode.create(
                p2p=daemon.p2p,
                initial_peers=alive or None,
                client_mode=client,
                record_validator=validator,
                wait_timeout=DHT_WAIT_SECONDS,
                blacklist_time=1.0,  # a peer that comes back after a cut must be asked again soon
                backoff_rate=1.5,
                cache_locally=False,  # coordination needs what the others hold now
                cache_on_store=False,
                reuse_get_requests=False,
                ensure_bootstrap_success=False,
            )
        except BaseException:
            await daemon.stop()
            raise
        network = cls(identity, daemon, dht, subkey, book)
        try:
            answers = await asyncio.gather(*[network._greet(peer_of(address)) for address in alive])
            if given and not any(answers):
                raise Unreachable(f"{', '.join(alive)}: the port answers, but no peer of a swarm is behind it")
        except BaseException:
            await network.close()
            raise
        return network

    async def _greet(self, node: NodeId) -> bool:
        """Ping a peer that this node starts from, and let it compare the clocks and dial back; whether it answers.

        Raises ClockOff when the clocks differ too much: this node's records would be refused.
        """
        try:
            return await self._dht.protocol.call_ping(PeerID.from_base58(node), validate=True) is not None
        except ValidationError as error:
            if "local time" in str(error):
                raise ClockOff(
                    f"the clock of this machine is off: {error}. Switch on time synchronisation (NTP)"
                ) from None
            self.is_dialled = False
            log.warning("%s: %s", UNDIALLED, DIAL_REMEDY)
            return True

    @property
    def p2p(self) -> P2P:
        """hivemind's libp2p handle, for registering and making calls."""
        return self._daemon.p2p

    async def addresses(self) -> list[str]:
        """The multiaddresses under which others see this node."""
        return [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]

    async def store(self, key: str, value: bytes, seconds: float) -> None:
        """Publish a record under this node's own sub-key for `seconds`.

        Whether it was taken shows only when it is read: hivemind tells the answer of one replica, and a peer that has
        just been given the same record by another way answers no.
        """
        try:
            async with asyncio.timeout(CALL_SECONDS):
                expiration = get_dht_time() + seconds
                await self._dht.store(key, value, expiration, subkey=self._subkey, beam_size=BEAM)
        except Exception as error:  # noqa: BLE001 - hivemind passes p2pd's refusals on in several classes
            log.debug("store %s: %s", key, str(error) or type(error).__name__)

    async def read(self, keys: Sequence[str], *, thorough: bool = True) -> dict[NodeId, Stored]:
        """The live records of some keys together, by the node that signed them: of several, the one that lasts longest.

        Args:
            keys: where to look; what nobody gives in time is left out.
            thorough: ask everybody who may have records, and put together what they say. Otherwise the first answer for
                a key does, which may be this node's own: much cheaper where there are many records, but whoever
                answers may have missed some of them.
        """
        everybody = {"sufficient_expiration_time": math.inf} if thorough else {"beam_size": BEAM}
        try:
            searches = await self._dht.get_many(keys, return_futures=True, **everybody)
            _, late = await asyncio.wait(searches.values(), timeout=CALL_SECONDS if thorough else QUICK_SECONDS)
        except Exception as error:  # noqa: BLE001 - as in store
            log.debug("read %s: %s", keys[0], str(error) or type(error).__name__)
            return {}
        for search in late:
            search.cancel()
        records = dict[NodeId, Stored]()
        for search in searches.values():
            entry = search.result() if search not in late and search.exception() is None else None
            signed: Any = entry.value if entry is not None else None
            for subkey, item in signed.items() if isinstance(signed, dict) else ():
                node = owner_of(subkey)
                known = records.get(node)
                if isinstance(item.value, bytes) and (known is None or known.until < item.expiration_time):
                    records[node] = Stored(item.value, item.expiration_time)
        return records

    async def connected(self) -> set[NodeId]:
        """The peers that a connection is open to; empty when p2pd does not answer in time."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return {NodeId(peer.peer_id.to_base58()) for peer in await self.p2p.list_peers()}
        except Exception as error:  # noqa: BLE001 - as in store
            log.debug("list of peers: %s", str(error) or type(error).__name__)
            return set()

    async def redial(self, missing: Iterable[NodeId]) -> int:
        """Dial peers of the address book, each with growing pauses; returns how many answer."""
        now = asyncio.get_running_loop().time()
        due = [(n, self.book.contacts[n]) for n in missing if n in self.book.contacts and n != self.node_id]
        answered = sum(await asyncio.gather(*[self._dial(node, c, now) for node, c in due if c.next_try <= now]))
        if answered:
            await self._fill_routing_table()
        return answered

    async def _fill_routing_table(self) -> None:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._dht.find_nearest_nodes([self._dht.node_id])
        except TimeoutError:
            log.debug("the routing table could not be filled within %.0f s", CALL_SECONDS)

    async def _dial(self, node: NodeId, contact: Contact, now: float) -> bool:
        contact.tries += 1
        contact.next_try = now + min(REDIAL_MOST_SECONDS, REDIAL_FIRST_SECONDS * 1.5**contact.tries)
        peer = PeerID.from_base58(node)
        bare = [Multiaddr(address.rsplit("/p2p/", 1)[0]) for address in contact.addresses]
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self.p2p._client.connect(peer, bare)
                if await self._dht.protocol.call_ping(peer) is None:
                    return False
        except Exception as error:  # noqa: BLE001 - hivemind passes p2pd's refusals on in several classes
            log.debug("dialling %s failed: %s", node, error)
            return False
        self._dht.blacklist.register_success(peer)
        contact.tries = 0
        return True

    async def watch(self) -> None:
        """Return never; raises SpesError when p2pd or the connection to it ends: nothing is heard after that."""
        raise SpesError(await self._daemon.wait())

    async def close(self) -> None:
        """Leave the DHT and end p2pd, even if that does not answer any more."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._dht.shutdown()
        except TimeoutError:
            log.debug("p2pd did not answer within %.0f s", CLOSE_SECONDS)
        await self._daemon.stop()


async def _start_daemon(given: Sequence[str], known: Sequence[str], **options: Any) -> tuple[P2PDaemon, list[str]]:
    """Start p2pd with those of the addresses that answer; returns them too.

    One that was given must answer, or a known one in its place. Known ones alone may all be out of date: they keep
    nobody from starting.
    """
    candidates = list(dict.fromkeys([*given, *known]))
    failures = dict(zip(candidates, await asyncio.gather(*map(probe, candidates)), strict=True))
    if alive := [address for address in candidates if not failures[address]]:
        try:
            return await P2PDaemon.start(peers=alive, **options), alive
        except WrongPeer:
            failures.update(dict.fromkeys(alive, "the port answers, but not as the peer with this id"))
    if given:
        reasons = "; ".join(f"{address}: {failures[address]}" for address in given)
        raise Unreachable(
            f"no peer answers ({reasons}). Check that its `spes-node` is running, and ask for its present join line"
        )
    return await P2PDaemon.start(**options), []
