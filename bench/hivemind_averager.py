"""hivemind's own averager for the shared part: what the swarm's averaging of shared shards is compared with.

It averages the shared part only; experts, which differ from node to node, it does not bring to anybody.

    python -m bench.hivemind_averager ADDRESS SHARED NODES COUNTERS [PEER...]
"""

import sys

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager

from bench.meter import Meter, line_counters, orders, tell
from bench.stage import Actor, Stage

MATCHMAKING_SECONDS = 1.0
REQUEST_SECONDS = 0.75
"""hivemind wants this to be less than the time for matchmaking, or all may wait for one another."""
STEP_SECONDS = 300.0


def start(stage: Stage, shared: int) -> list[Actor]:
    """An averager on each node.

    Args:
        stage: where.
        shared: values of the shared part.
    """
    actors: list[Actor] = []
    peers: list[str] = []
    for node in range(1, stage.nodes + 1):
        sizes = [str(shared), str(stage.nodes), stage.counters]
        actors.append(
            stage.start(node, "bench.hivemind_averager", stage.address(node), *sizes, *peers, name="averager")
        )
        # one after the other, with all before it as peers: two that join at the same moment may never find each other
        peers += actors[-1].hear()["addresses"]
    return actors


def take_part(address: str, shared: int, nodes: int, counters: str, peers: list[str]) -> None:
    """Average whenever standard input says so, until it ends."""
    values = torch.randn(shared)
    meter = Meter(line_counters if counters == "line" else lambda: (0, 0))
    dht = DHT(
        host_maddrs=[f"/ip4/{address}/tcp/0"], initial_peers=peers, start=True, use_relay=False, use_auto_relay=False
    )
    averager = DecentralizedAverager(
        [values],
        dht,
        prefix="shared",
        target_group_size=nodes,
        min_group_size=nodes,
        min_matchmaking_time=MATCHMAKING_SECONDS,
        request_timeout=REQUEST_SECONDS,
        start=True,
    )
    tell({"addresses": [str(each) for each in dht.get_visible_maddrs()]})
    for number in orders():
        meter.mark("begin", number)
        group = averager.step(timeout=STEP_SECONDS)
        if group is None or len(group) != nodes:
            raise RuntimeError(f"averaged with {group}")
        meter.mark("end", number)
    meter.mark("done")
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    where, size, count, how, *others = sys.argv[1:]
    take_part(where, int(size), int(count), how, others)
