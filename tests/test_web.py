"""The HTTP server of a node: what it tells, to whom, and that it ends when the daemon does."""

import asyncio
import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from model.errors import UserError
from node.cli import PAGE_PORT
from node.live import Live
from node.observer import Observer
from node.web.api import STATIC
from node.web.server import PagePlace, serving
from swarm.documents import Commit, Share, Signed, canonical, digest_of
from swarm.history import RoundLine, round_line
from swarm.records import View
from tests import examples
from tests.examples import NODES, RUN

ANN, BEN = NODES[:2]
COMMIT = examples.head(
    2,
    loss=2.5,
    heldout_loss=2.75,
    busy=0.5,
    reduce_seconds=(1.5,),
    choices=((4, 4, 4, 4), (8, 8, 0, 0)),
    shares={ANN: Share(tokens=100, steps=4)},
)
EVIL = '<img src=x onerror="document.title=1">'


def signed(commit: Commit) -> Signed[Commit]:
    return Signed(commit, ANN, digest_of(canonical(commit)), b"")


class Site:
    """A server in a thread of its own, whose swarm the test changes."""

    def __init__(self, place: PagePlace, home: Path) -> None:
        self.rounds: list[RoundLine] = []
        self.observer = Observer(Signed(examples.manifest(), ANN, RUN, b""), me=ANN, rounds=self.rounds)
        self.address = ""
        self._place, self._home = place, home
        self._loop = asyncio.new_event_loop()
        self._live = Live()
        self._stop = asyncio.Event()

    async def serve(self, ready: Callable[[], None]) -> None:
        await self._live.publish(self.observer.snapshot())
        async with serving(self._place, self._home, self._live, {2: COMMIT}.get) as address:
            self.address = address
            ready()
            await self._stop.wait()

    def run(self) -> None:
        started = asyncio.Event()
        task = self._loop.create_task(self.serve(started.set))
        self._loop.run_until_complete(
            asyncio.wait({task, self._loop.create_task(started.wait())}, return_when="FIRST_COMPLETED")
        )
        self._thread = Thread(target=self._loop.run_until_complete, args=(task,), daemon=True)
        self._thread.start()

    def publish(self) -> None:
        asyncio.run_coroutine_threadsafe(self._live.publish(self.observer.snapshot()), self._loop).result(5)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server has ended"
        self._loop.close()

    @property
    def port(self) -> int:
        match = re.search(r":(\d+)/", self.address)
        assert match is not None
        return int(match[1])

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def state(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.ask("/api/v1/state")[2])
        return data


@contextmanager
def site(home: Path, place: PagePlace | None = None) -> Iterator[Site]:
    served = Site(place or PagePlace(port=0), home)
    served.run()
    try:
        yield served
    finally:
        served.stop()


def test_the_state_is_the_snapshot_that_was_published_last(tmp_path: Path) -> None:
    with site(tmp_path) as served:
        assert served.state()["round"] is None and served.ask("/readyz")[0] == 503
        served.observer.see(View({ANN: examples.record(name="ann", experts=(0, 1)), BEN: examples.record(name=EVIL)}))
        served.observer.adopt(signed(COMMIT))
        served.observer.tell("training", "round 3: up to 4 steps")
        assert served.state()["round"] is None, "what is not published is not told"
        served.publish()
        state = served.state()
        assert (state["round"], state["loss"], state["experts_covered"]) == (2, 2.5, 2)
        assert {node["name"] for node in state["nodes"]} == {"ann", EVIL}
        assert state["dead_experts"] == [[1, 2], [1, 3]] and state["expert_load"][1] == [0.5, 0.5, 0, 0]
        assert state["phases"][-1]["reason"] == "round 3: up to 4 steps"
        assert served.ask("/readyz")[0] == served.ask("/healthz")[0] == 200


def test_past_rounds_are_told_where_they_are_known(tmp_path: Path) -> None:
    with site(tmp_path) as served:
        status, _, body = served.ask("/api/v1/rounds/2")
        assert status == 200 and json.loads(body)["tokens"] == {ANN: 100}
        assert served.ask("/api/v1/rounds/3")[0] == served.ask("/api/v1/rounds/x")[0] == 404


def events(stream: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in iter(stream.readline, b""):
        word, _, rest = line.decode().rstrip().partition(": ")
        if word == "event":
            name = rest
        elif word == "data":
            yield name, json.loads(rest)


def test_changes_arrive_as_events_and_the_stream_ends_with_the_server(tmp_path: Path) -> None:
    with site(tmp_path) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
        connection.request("GET", "/api/v1/events")
        answer = connection.getresponse()
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        stream = events(answer)
        name, data = next(stream)
        assert (name, data["round"]) == ("state", None) and "rounds" not in data
        served.observer.adopt(signed(COMMIT))
        served.rounds.append(round_line(signed(COMMIT), examples.manifest(), now=1.0, seconds=2.0, bytes_moved=3))
        served.publish()
        name, data = next(stream)
        assert (name, data["round"], data["tokens_per_second"]) == ("round", 2, 50.0)
        name, data = next(stream)
        assert (name, data["round"]) == ("state", 2)
        began = time.monotonic()
        served._loop.call_soon_threadsafe(served._stop.set)
        assert next(stream, None) is None, "the server ends it"
        assert time.monotonic() - began < 5, "nobody waits for a browser"
        connection.close()


def test_only_this_machine_is_answered_under_its_own_name(tmp_path: Path) -> None:
    with site(tmp_path) as served:
        for host in ("127.0.0.1", f"localhost:{served.port}", "[::1]:80"):
            assert served.ask("/api/v1/state", Host=host)[0] == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
            assert served.ask("/api/v1/state", Host=host)[0] == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(tmp_path: Path, method: str) -> None:
    with site(tmp_path) as served:
        assert served.ask("/api/v1/state", method)[0] == 405


def test_a_browser_is_told_to_run_nothing_but_the_page_and_nobody_may_embed_it(tmp_path: Path) -> None:
    with site(tmp_path) as served:
        for path in ("/", "/api/v1/state", "/static/app.js", "/nothing"):
            _, headers, _body = served.ask(path, Origin="http://evil.example")
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy and headers["x-content-type-options"] == "nosniff"
            assert not [name for name in headers if name.startswith("access-control")]
        page = served.ask("/")[2]
        assert "<script>" not in page and "style=" not in page and not re.search(r"\son\w+=", page)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for path in STATIC.rglob("*"):
        if path.suffix in (".html", ".css", ".js"):
            elsewhere = re.findall(
                r"(?:src|href|from|import|url\()\s*[=(]?\s*[\"']?(https?:)?//[^\"')\s]+", path.read_text()
            )
            assert not elsewhere, path
    named = (STATIC / "vendor" / "LICENSES.md").read_text()
    assert all(f"`{path.name}`" in named for path in (STATIC / "vendor").iterdir() if path.suffix in (".js", ".css"))


def test_others_need_the_token(tmp_path: Path) -> None:
    with site(tmp_path, PagePlace("0.0.0.0", 0)) as served:
        token = (tmp_path / "dashboard.token").read_text()
        assert served.address.endswith(f"/?token={token}") and len(token) > 30
        assert (tmp_path / "dashboard.token").stat().st_mode & 0o777 == 0o600
        assert served.ask("/api/v1/state")[0] == served.ask("/")[0] == served.ask("/metrics")[0] == 401
        assert served.ask("/?token=wrong")[0] == served.ask("/", Cookie="spes_token=wrong")[0] == 401
        assert served.ask("/healthz")[0] == 200
        assert served.ask("/api/v1/state", Authorization=f"Bearer {token}", Host="box.example")[0] == 200
        status, headers, _ = served.ask(f"/?token={token}")
        assert (status, headers["location"]) == (303, "/"), "it does not stay in the address"
        assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
        cookie = headers["set-cookie"].partition(";")[0]
        assert served.ask("/api/v1/state", Cookie=cookie)[0] == 200
        assert served.ask("/api/v1/state", Cookie=f"expires=1; a[b]=c; {cookie}; d")[0] == 200


def test_metrics_are_open_metrics_with_base_units(tmp_path: Path) -> None:
    with site(tmp_path) as served:
        served.observer.see(View({ANN: examples.record(name="ann", experts=(0, 1), sent=7, state="training")}))
        served.observer.adopt(signed(COMMIT))
        served.publish()
        status, headers, body = served.ask("/metrics")
        assert status == 200 and headers["content-type"].startswith("application/openmetrics-text")
        families = {family.name: family for family in text_string_to_metric_families(body)}  # type: ignore[no-untyped-call]
        assert all(name.startswith("spes_") for name in families)
        assert all(family.documentation for family in families.values())
        values = {(s.name, *s.labels.values()): s.value for f in families.values() for s in f.samples}
        assert values["spes_round",] == 2 and values["spes_training_loss",] == 2.5
        assert values["spes_tokens_processed_total",] == 1000
        assert values["spes_experts_covered_ratio",] == 0.5 and values["spes_utilisation_ratio",] == 0.5
        assert values["spes_bytes_total", "sent"] == 7
        assert values["spes_dead_experts",] == 2 and values["spes_expert_load_ratio", "0"] == 0.375
        assert values["spes_swarm_nodes", "training"] == 1 and values["spes_swarm_nodes", "lost"] == 0


def test_several_nodes_on_a_box_take_ports_in_turn_and_a_chosen_one_is_kept_or_refused(tmp_path: Path) -> None:
    with site(tmp_path, PagePlace()) as first, site(tmp_path, PagePlace()) as second:
        assert first.port != second.port
        with pytest.raises(UserError, match=f"--dashboard 127.0.0.1:{first.port}: address already in use"):
            PagePlace.parse(str(first.port)).bind()


@pytest.mark.parametrize("text", ["x", "1.2.3:80", "70000", "box:8730", ""])
def test_a_wrong_place_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not PORT or HOST:PORT"):
        PagePlace.parse(text)


def test_the_grafana_dashboard_asks_for_metrics_that_are_there(tmp_path: Path) -> None:
    docker = Path(__file__).parent.parent / "docker"
    dashboard = json.loads((docker / "grafana" / "swarm.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"spes_\w+", expression)}
    with site(tmp_path) as served:
        served.observer.see(View({ANN: examples.record(name="ann")}))
        served.observer.adopt(signed(COMMIT))
        served.publish()
        body = served.ask("/metrics")[2]
        port = re.search(r"127\.0\.0\.1:(\d+)", (docker / "prometheus" / "prometheus.yml").read_text())
    told = {line.partition(" ")[0].partition("{")[0] for line in body.splitlines() if not line.startswith("#")}
    assert len(names) > 12 and names <= told, names - told
    labels = {label for expression in asked for label in re.findall(r"by \((\w+)\)", expression)}
    assert all(f'{label}="' in body for label in labels)
    assert port is not None and int(port[1]) == PAGE_PORT
