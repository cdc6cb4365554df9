"""The HTTP API of a node: the page, its data, its events, metrics and probes. All of it only reads."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from node.live import Live
from node.snapshot import Snapshot, as_json, round_facts
from node.web.metrics import CONTENT_TYPE, exposition
from swarm.documents import Commit

STATIC = Path(str(files("node.web"))) / "static"
READY_STATES = frozenset({"training", "averaging", "merging", "following", "paused", "waiting", "finished"})
"""States of a node that holds the state of the run."""
RECENT_EVENTS = 20
"""Those that a change comes with; who was away asks for all of them."""
SILENCE_SECONDS = 10.0
"""A stream of events says at least so often that it lives."""
API_HEADERS = {"cache-control": "no-store"}


def build(live: Live, find_commit: Callable[[int], Commit | None]) -> Starlette:
    """The application.

    Args:
        live: what there is to tell.
        find_commit: the commit of a past round, if it is at hand.
    """

    def current() -> Snapshot:
        assert live.snapshot is not None, "there is one before the server starts"
        return live.snapshot

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def state(request: Request) -> Response:
        return JSONResponse(as_json(current()), headers=API_HEADERS)

    async def round_of(request: Request) -> Response:
        commit = find_commit(request.path_params["number"])
        if commit is None:
            return JSONResponse({"error": "that round is not here"}, status_code=404, headers=API_HEADERS)
        return JSONResponse(round_facts(commit), headers=API_HEADERS)

    async def events(request: Request) -> Response:
        return StreamingResponse(_stream(live), media_type="text/event-stream", headers=API_HEADERS)

    async def metrics(request: Request) -> Response:
        return Response(exposition(current()), media_type=CONTENT_TYPE, headers=API_HEADERS)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        ready = is_ready(current())
        return PlainTextResponse("ready\n" if ready else "not yet\n", status_code=200 if ready else 503)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/v1/state", state),
            Route("/api/v1/events", events),
            Route("/api/v1/rounds/{number:int}", round_of),
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )


def is_ready(snapshot: Snapshot) -> bool:
    """Whether this process holds, or sees, the state of the run."""
    if snapshot.me is None:
        return snapshot.commit is not None
    return bool(snapshot.phases) and snapshot.phases[-1].state in READY_STATES


async def _stream(live: Live) -> AsyncIterator[str]:
    """Server-sent events: `state` without its long part whenever there is something new, `round` for each round."""
    yield "retry: 2000\n\n"
    version, last_round = 0, -1
    while True:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                snapshot = await live.newer(version)
        except TimeoutError:
            yield ": still here\n\n"
            continue
        if snapshot is None:
            return
        if version:  # before that the page asks for everything
            for line in snapshot.rounds:
                if line.round > last_round:
                    yield _event("round", asdict(line))
        version, last_round = snapshot.version, snapshot.rounds[-1].round if snapshot.rounds else -1
        yield _state_event(snapshot)


@lru_cache(maxsize=1)
def _state_event(snapshot: Snapshot) -> str:
    """The same for everybody who looks on."""
    events = [asdict(event) for event in snapshot.events[-RECENT_EVENTS:]]
    return _event("state", as_json(snapshot, rounds=False) | {"events": events})


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
