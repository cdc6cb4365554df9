"""A round with a parameter server, as the paper's released code has it: what the swarm is compared with.

Over gRPC every node uploads what it has trained, as fp32 values; the server waits for all, averages the shared part and
takes each expert from its owner; then every node downloads the whole model. Left out is what would only slow it down:
there the clients poll every 20 s, uploads are pickled, and a message holds up to 1.9 GiB (here 4 MiB of a stream).

    python -m bench.parameter_server server ADDRESS SHARED EXPERTS NODES COUNTERS
    python -m bench.parameter_server client ADDRESS SHARED EXPERTS NODES COUNTERS NODE
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np

from bench.meter import Meter, line_counters, orders, tell
from bench.stage import Actor, Stage

CHUNK_BYTES = 4 << 20
LIMITS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
SERVICE = "ParameterServer"
SERVER_HOST = 1
READY_SECONDS = 30.0


def start(stage: Stage, shared: int, experts: int) -> list[Actor]:
    """The server on one of the nodes, and a client on each; the server is the last of the list.

    Args:
        stage: where.
        shared, experts: values of the shared part and of all experts.
    """
    sizes = [str(shared), str(experts), str(stage.nodes), stage.counters]
    module = "bench.parameter_server"
    server = stage.start(SERVER_HOST, module, "server", f"{stage.address(SERVER_HOST)}:0", *sizes, name="server")
    address = server.hear()["address"]
    clients = [
        stage.start(node, module, "client", address, *sizes, str(node), name="client")
        for node in range(1, stage.nodes + 1)
    ]
    for client in clients:
        client.hear()
    return [*clients, server]


class Own:
    """Counts bytes of values."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def __call__(self) -> tuple[int, int]:
        return self.sent, self.received


def chunks(values: np.ndarray, own: Own) -> Iterator[bytes]:
    """The bytes of an array, piece by piece."""
    view = memoryview(values.data).cast("B")
    for start_byte in range(0, len(view), CHUNK_BYTES):
        chunk = bytes(view[start_byte : start_byte + CHUNK_BYTES])
        own.sent += len(chunk)
        yield chunk


def fill(values: np.ndarray, stream: Iterator[bytes], own: Own) -> None:
    """The other way round. Raises ValueError when it is not what was expected."""
    view, position = memoryview(values.data).cast("B"), 0
    for chunk in stream:
        view[position : position + len(chunk)] = chunk
        position += len(chunk)
    own.received += position
    if position != len(view):
        raise ValueError(f"{position} bytes of {len(view)}")


class Server:
    """Collects the uploads of a round; whoever brings the last one averages them."""

    def __init__(self, shared: int, experts: int, nodes: int) -> None:
        self.own = Own()
        self._shared = shared
        self._slice = experts // nodes
        self._nodes = nodes
        self._uploads: dict[int, np.ndarray] = {}
        self._model = np.zeros(shared + experts, dtype=np.float32)
        self._round = 0
        """The last one that is averaged."""
        self._changed = threading.Condition()

    def upload(self, stream: Iterator[bytes], context: Any) -> bytes:
        """Take what a node has trained; answers when the round is averaged or the upload is not the last one."""
        node = int(dict(context.invocation_metadata())["node"])
        values = np.empty(self._shared + self._slice, dtype=np.float32)
        fill(values, stream, self.own)
        with self._changed:
            self._uploads[node] = values
            if len(self._uploads) == self._nodes:
                self._average()
                self._uploads.clear()
                self._round += 1
                self._changed.notify_all()
        return b""

    def _average(self) -> None:
        shared = self._model[: self._shared]
        shared[:] = 0
        for node, values in self._uploads.items():
            shared += values[: self._shared]
            begin = self._shared + (node - 1) * self._slice
            self._model[begin : begin + self._slice] = values[self._shared :]
        shared /= self._nodes

    def download(self, request: bytes, context: Any) -> Iterator[bytes]:
        """Give the whole model, once the round is averaged."""
        with self._changed:
            self._changed.wait_for(lambda: self._round >= int(request))
        yield from chunks(self._model, self.own)


def serve(address: str, shared: int, experts: int, nodes: int, counters: str) -> None:
    """Be the server until standard input ends."""
    service = Server(shared, experts, nodes)
    handlers = {
        "upload": grpc.stream_unary_rpc_method_handler(service.upload),
        "download": grpc.unary_stream_rpc_method_handler(service.download),
    }
    server = grpc.server(ThreadPoolExecutor(2 * nodes), options=LIMITS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    host, port = address.rsplit(":", 1)
    port = server.add_insecure_port(address)
    meter = Meter(line_counters if counters == "line" else service.own)
    server.start()
    tell({"address": f"{host}:{port}"})
    for number in orders():
        meter.mark("begin", number)
    server.stop(None).wait()
    meter.mark("done")


def take_part(address: str, shared: int, experts: int, nodes: int, counters: str, node: str) -> None:
    """Be a client until standard input ends."""
    own = Own()
    trained = np.random.default_rng(int(node)).standard_normal(shared + experts // nodes, dtype=np.float32)
    model = np.empty(shared + experts, dtype=np.float32)
    model[:] = 0  # a node has the model in memory all the time
    meter = Meter(line_counters if counters == "line" else own)
    with grpc.insecure_channel(address, options=LIMITS) as channel:
        grpc.channel_ready_future(channel).result(timeout=READY_SECONDS)
        upload = channel.stream_unary(f"/{SERVICE}/upload")
        download = channel.unary_stream(f"/{SERVICE}/download")
        tell({"ready": node})
        for number in orders():
            meter.mark("begin", number)
            upload(chunks(trained, own), metadata=[("node", node)])
            fill(model, download(str(number).encode()), own)
            meter.mark("end", number)
    meter.mark("done")


def _three(numbers: list[str]) -> tuple[int, int, int]:
    shared, experts, nodes = map(int, numbers)
    return shared, experts, nodes


if __name__ == "__main__":
    role, where, *sizes, counted = sys.argv[1:7]
    if role == "server":
        serve(where, *_three(sizes), counted)
    else:
        take_part(where, *_three(sizes), counted, sys.argv[7])
