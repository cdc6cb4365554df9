"""Real peers on loopback: records between them, strangers who attack them, and addresses that are wrong."""

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from model.errors import SpesError, Unreachable, UserError
from swarm import decoder_guard
from swarm.decoder_guard import MAX_NESTING
from swarm.identity import Identity, NodeId
from swarm.network import MAX_BOOK, AddressBook, Network, peer_of
from swarm.p2p_daemon import P2PDaemon
from swarm.validator import MAX_RECORD_BYTES, record_validator

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
YEARS = 10 * 365 * 86_400.0


@asynccontextmanager
async def running(network: Network) -> AsyncIterator[Network]:
    try:
        yield network
    finally:
        await network.close()


@asynccontextmanager
async def swarm(identities: Sequence[Identity]) -> AsyncIterator[list[Network]]:
    """Peers who all know the first one."""
    networks = list[Network]()
    try:
        for identity in identities:
            networks.append(await Network.start(identity, peers=await networks[0].addresses() if networks else ()))
        yield networks
    finally:
        for network in networks:
            await network.close()


@asynccontextmanager
async def stranger(peers: Sequence[str]) -> AsyncIterator[DHTNode]:
    """A peer of the same DHT without any rules of its own."""
    daemon = await P2PDaemon.start(listen=[LOOPBACK], peers=peers)
    dht = await DHTNode.create(p2p=daemon.p2p, initial_peers=list(peers))
    try:
        yield dht
    finally:
        await dht.shutdown()
        await daemon.stop()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def at(port: int, node: NodeId) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{node}"


def nested(levels: int) -> bytes:
    value: object = ()
    for _ in range(levels - 1):
        value = (value,)
    return bytes(MSGPackSerializer.dumps(value))


@pytest.fixture(autouse=True)
def sockets() -> Iterator[Path]:
    """Where p2pd's sockets are; at the end of every test neither a socket nor a process is left."""
    with tempfile.TemporaryDirectory(prefix="spes") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert not list(Path(folder).iterdir())
    assert not [child for child in psutil.Process().children(recursive=True) if child.name() == "p2pd"]


# records


async def values(network: Network, *keys: str, thorough: bool = True) -> dict[NodeId, bytes]:
    """What a node finds."""
    return {node: stored.value for node, stored in (await network.read(keys, thorough=thorough)).items()}


def test_records_go_round_and_the_owner_replaces_its_own(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities) as networks:
            for network in networks:
                await network.store("key", network.node_id.encode(), 30.0)
            expected = {identity.node_id: identity.node_id.encode() for identity in identities}
            for network in networks:
                assert await values(network, "key") == await values(network, "key", thorough=False) == expected
                assert await values(network, "other key") == {}
            await networks[2].store("key", b"newer", 31.0)
            assert (await values(networks[1], "key"))[identities[2].node_id] == b"newer"

    uvloop.run(scenario())


def test_a_record_expires(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:2]) as (first, second):
            await first.store("key", b"value", 2.0)
            assert await values(second, "key") != {}
            await asyncio.sleep(2.1)
            assert await values(second, "key") == {}

    uvloop.run(scenario())


def test_too_long_lived_or_too_large_records_are_not_stored(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:2]) as (first, second):
            await first.store("key", b"value", YEARS)
            await first.store("key", b"x" * MAX_RECORD_BYTES, 30.0)
            assert await values(second, "key") == {}

    uvloop.run(scenario())


def test_a_client_reads_and_serves_nothing(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:1]) as (node,):
            await node.store("key", b"value", 30.0)
            client = Network.start(Identity.ephemeral(), peers=await node.addresses(), client=True)
            async with running(await client) as reader:
                assert await values(reader, "key") == {node.node_id: b"value"}

    uvloop.run(scenario())


# strangers


def test_a_stranger_can_neither_overwrite_nor_wipe_a_record(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:2]) as (owner, reader), stranger(await owner.addresses()) as thief:
            _, mark = record_validator(identities[0])
            await owner.store("key", b"mine", 30.0)
            soon, never = get_dht_time() + 60.0, get_dht_time() + YEARS
            for expiration in (soon, never):
                await thief.store("key", b"stolen", expiration, subkey=mark)
                await thief.store("key", b"gone", expiration)
                await thief.store("key", b"junk", expiration, subkey=b"junk")
                await thief.store("key", b"junk", expiration, subkey=mark + b"x")
            for victim in (owner, reader):
                for value, subkey in ((b"gone", None), (b"stolen", mark), (b"junk", b"junk")):
                    for in_cache in (False, True):
                        stored = await thief.protocol.call_store(
                            victim.p2p.peer_id, [DHTID.generate("key")], [value], never, subkey and [subkey], in_cache
                        )
                        assert stored == [False]
            for network in (owner, reader):
                assert await values(network, "key") == {owner.node_id: b"mine"}
            await owner.store("key", b"still mine", 31.0)
            assert await values(reader, "key") == {owner.node_id: b"still mine"}

    uvloop.run(scenario())


def test_a_record_cannot_be_copied_under_another_key(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:2]) as (owner, reader), stranger(await owner.addresses()) as thief:
            _, mark = record_validator(identities[0])
            await owner.store("key", b"mine", 30.0)
            seen = await thief.protocol.call_find(owner.p2p.peer_id, [DHTID.generate("key")])
            ((value, _),) = seen.values()
            record = next(iter(value.value.items()))[1] if value else None
            assert record is not None, "the stranger sees the signed record"
            for key in ("other", "key"):
                stored = await thief.protocol.call_store(
                    reader.p2p.peer_id, [DHTID.generate(key)], [record.value], record.expiration_time + 1, [mark]
                )
                assert stored == [False]

    uvloop.run(scenario())


def test_deeply_nested_messages_are_an_ordinary_error() -> None:
    decoder_guard.install()
    decoder_guard.install()
    for levels in (1, 3, MAX_NESTING):
        assert MSGPackSerializer.dumps(MSGPackSerializer.loads(nested(levels))) == nested(levels)
    for levels in (MAX_NESTING + 1, 40):
        with pytest.raises(ValueError, match="nested deeper than 16"):
            MSGPackSerializer.loads(nested(levels))
    assert MSGPackSerializer.loads(nested(MAX_NESTING)), "one refusal does not count towards the next message"


def test_a_nested_message_from_a_peer_does_no_harm(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:1]) as (node,), stranger(await node.addresses()) as thief:
            stub = thief.protocol.get_stub(node.p2p.peer_id)
            bomb, plain = nested(40), MSGPackSerializer.dumps(b"x")
            for tag, value in ((thief.protocol.IS_DICTIONARY, bomb), (bomb, plain)):
                request = dht_pb2.StoreRequest(
                    keys=[DHTID.generate("key").to_bytes()],
                    subkeys=[tag],
                    values=[value],
                    expiration_time=[get_dht_time() + 30.0],
                    in_cache=[False],
                )
                try:
                    assert not any((await stub.rpc_store(request, timeout=5.0)).store_ok)
                except P2PHandlerError as error:
                    assert "nested deeper" in str(error)
            await node.store("key", b"value", 30.0)
            assert await values(node, "key") == {node.node_id: b"value"}

    uvloop.run(scenario())


# addresses


def refusal(identity: Identity, kind: type[UserError] = UserError, **options: Sequence[str]) -> str:
    with pytest.raises(kind) as refused:
        uvloop.run(Network.start(identity, **options))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_unreachable_peers_are_named_with_the_reason(identities: list[Identity]) -> None:
    me, peer, other = identities
    closed = at(free_port(), peer.node_id)
    unknown = f"/dns4/nowhere.invalid/tcp/1/p2p/{other.node_id}"
    said = refusal(me, Unreachable, peers=[closed, unknown])
    assert f"{closed}: connection refused" in said and f"{unknown}: " in said


def test_one_peer_that_answers_is_enough(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:1]) as (node,):
            closed = at(free_port(), identities[2].node_id)
            async with running(await Network.start(identities[1], peers=[closed, *await node.addresses()])) as second:
                await node.store("key", b"value", 30.0)
                assert await values(second, "key") == {node.node_id: b"value"}

    uvloop.run(scenario())


def test_another_peer_at_the_address_is_said_in_one_line(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:1]) as (node,):
            (address,) = await node.addresses()
            wrong = address.replace(node.node_id, identities[2].node_id)
            with pytest.raises(UserError) as refused:
                await Network.start(identities[1], peers=[wrong])
            said = str(refused.value)
            assert f"{wrong}: the port answers, but not as the peer with this id" in said
            assert "join line" in said and "\n" not in said

    uvloop.run(scenario())


def test_something_else_at_the_port_is_said_in_one_line(identities: list[Identity]) -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            address = at(server.sockets[0].getsockname()[1], identities[2].node_id)
            with pytest.raises(Unreachable, match="not as the peer with this id"):
                await Network.start(identities[1], peers=[address])

    uvloop.run(scenario())


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:31337",
        "/ip4/127.0.0.1/tcp/31337",
        "/ip4/127.0.0.1/tcp/31337/p2p/nobody",
        "/ip4/127.0.0.1/tcp/99999/p2p/{node}",
        "/ip4/300.0.0.1/tcp/31337/p2p/{node}",
        "/ip4/127.0.0.1/udp/31337/quic/p2p/{node}",
        "/p2p/{node}",
    ],
)
def test_a_malformed_address_is_refused_with_an_example(identities: list[Identity], address: str) -> None:
    address = address.format(node=identities[1].node_id)
    said = refusal(identities[0], peers=[address])
    assert said.startswith(f"{address}: not a peer address. It looks like /ip4/")


def test_the_peer_of_an_address_is_its_last_part(identities: list[Identity]) -> None:
    node = identities[0].node_id
    for host in ("/ip4/203.0.113.5", "/ip6/2001:db8::1", "/dns4/node.example.org"):
        assert peer_of(f"{host}/tcp/31337/p2p/{node}") == node


def test_a_taken_port_is_refused_with_the_option(identities: list[Identity]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(identities[0], listen=[f"/ip4/127.0.0.1/tcp/{port}"])
    assert f"127.0.0.1:{port}" in said and "--listen" in said


# the address book


def test_the_address_book_is_kept(tmp_path: Path, identities: list[Identity]) -> None:
    path = tmp_path / "peers.json"
    book = AddressBook.load(path)
    first, second = (at(1000 + index, identity.node_id) for index, identity in enumerate(identities[:2]))
    book.update({identities[0].node_id: [first], identities[1].node_id: [second], identities[2].node_id: []})
    assert AddressBook.load(path).addresses() == [first, second]
    book.update({identities[0].node_id: [at(2000, identities[0].node_id)]})
    assert AddressBook.load(path).addresses() == [second, at(2000, identities[0].node_id)]
    assert list(tmp_path.iterdir()) == [path]


def test_the_address_book_forgets_those_it_has_not_seen_for_longest() -> None:
    book = AddressBook(None)
    for number in range(MAX_BOOK + 5):
        book.update({str(number): [f"address {number}"]})
    assert len(book.contacts) == MAX_BOOK and "4" not in book.contacts and str(MAX_BOOK + 4) in book.contacts


@pytest.mark.parametrize("damage", [b"", b"{", b"5", b"null", b"[5]", b'["x"]', b"[[]]", b"\xff\xfe", b'{"a": 1}'])
def test_a_damaged_address_book_is_an_empty_one(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(damage)
    assert AddressBook.load(path).addresses() == []


def test_a_known_peer_replaces_a_given_one_that_is_gone(tmp_path: Path, identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:1]) as (node,):
            book = tmp_path / "peers.json"
            book.write_text(json.dumps(await node.addresses()))
            gone = at(free_port(), identities[2].node_id)
            async with running(await Network.start(identities[1], peers=[gone], book_path=book)) as second:
                await second.store("key", b"value", 30.0)
                assert await values(node, "key") == {second.node_id: b"value"}

    uvloop.run(scenario())


def test_old_addresses_keep_nobody_from_starting(tmp_path: Path, identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with swarm(identities[:1]) as (node,):
            (address,) = await node.addresses()
            book = tmp_path / "peers.json"
            book.write_text(json.dumps([address.replace(node.node_id, identities[2].node_id)]))
            async with running(await Network.start(identities[1], book_path=book)) as alone:
                await alone.store("key", b"value", 30.0)

    uvloop.run(scenario())


def test_redial_brings_back_a_peer_that_was_restarted(identities: list[Identity]) -> None:
    async def scenario() -> None:
        listen = [f"/ip4/127.0.0.1/tcp/{free_port()}"]
        async with running(await Network.start(identities[0])) as node:
            peer = await Network.start(identities[1], listen=listen, peers=await node.addresses())
            node.book.update({peer.node_id: await peer.addresses()})
            await peer.close()
            async with running(await Network.start(identities[1], listen=listen)) as peer:
                await peer.store("key", b"back", 30.0)
                async with asyncio.timeout(15.0):
                    while not await node.redial([peer.node_id]):
                        await asyncio.sleep(0.2)
                assert await values(node, "key") == {peer.node_id: b"back"}
                await node.store("key", b"welcome", 30.0)
                assert (await values(peer, "key"))[node.node_id] == b"welcome"

    uvloop.run(scenario())


def test_redial_of_a_peer_that_is_gone_pauses_longer_each_time(identities: list[Identity]) -> None:
    async def scenario() -> None:
        async with running(await Network.start(identities[0])) as node:
            gone = identities[1].node_id
            node.book.update({gone: [at(free_port(), gone)], node.node_id: await node.addresses()})
            assert await node.redial([gone, node.node_id, "unknown"]) == 0
            contact = node.book.contacts[gone]
            pause = contact.next_try - asyncio.get_running_loop().time()
            assert await node.redial([gone]) == 0 and contact.tries == 1, "it is not due yet"
            contact.next_try = 0.0
            assert await node.redial([gone]) == 0 and contact.tries == 2
            assert contact.next_try - asyncio.get_running_loop().time() > pause
            assert node.book.contacts[node.node_id].tries == 0, "nobody dials itself"
            node.book.update({gone: contact.addresses})
            assert node.book.contacts[gone] is contact, "to hear the same of it again is no reason to dial it at once"
            node.book.update({gone: [at(free_port(), gone)]})
            assert node.book.contacts[gone].tries == 0

    uvloop.run(scenario())


# the end


def test_nothing_is_left_after_closing(identities: list[Identity], sockets: Path) -> None:
    def left() -> tuple[int, int]:
        children = [child for child in psutil.Process().children(recursive=True) if child.name() == "p2pd"]
        return len(children), len(list(sockets.iterdir()))

    async def scenario() -> None:
        async with swarm(identities[:2]):
            assert left() == (2, 2)
        assert left() == (0, 0)
        with pytest.raises(SpesError, match="p2pd ended at its start"):
            await Network.start(identities[0], announce=["nonsense"])
        assert left() == (0, 0)

    uvloop.run(scenario())


def test_a_peer_is_found_by_what_its_record_says(identities: list[Identity]) -> None:
    """p2pd by itself may know no way to a peer that has joined elsewhere."""

    async def scenario() -> None:
        first = await Network.start(identities[0])
        second = await Network.start(identities[1])
        async with running(first), running(second):
            assert await first.connected() == set()
            first.book.update({second.node_id: await second.addresses()})
            assert await first.redial([second.node_id]) == 1
            assert await first.connected() == {second.node_id} and await second.connected() == {first.node_id}

    uvloop.run(scenario())
