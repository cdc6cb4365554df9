"""Who may look: only this machine, or whoever has the token; and what a browser must not do with what it gets."""

import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from swarm.identity import write_secret

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
COOKIE = "spes_token"
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""They tell nothing but that the process lives, and probes have no token."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def read_token(home: Path) -> str:
    """The token of this node's page, made at the first call and kept in a file that only its owner can read."""
    path = home / "dashboard.token"
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(24).encode())
    return path.read_text().strip()


class Guard:
    """Refuses requests that no one with a right to look has sent, and marks all answers."""

    def __init__(self, app: App, token: str | None) -> None:
        """Args:
        app: answers the others.
        token: that a request must carry; None where only this machine can connect. Then the name that a browser was
            given for this machine must be one of its own: a page elsewhere may have its name point here.
        """
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def marked(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        if scope["method"] not in ("GET", "HEAD"):
            await _answer(marked, 405, "this page changes nothing: GET only", {"allow": "GET, HEAD"})
        elif self._token is None and _host(headers) not in LOOPBACK_HOSTS:
            await _answer(marked, 400, "this page is for this machine: open it as http://127.0.0.1 or localhost")
        elif (
            self._token is not None
            and scope["path"] not in OPEN_PATHS
            and not await self._has_token(scope, headers, marked)
        ):
            return
        else:
            await self._app(scope, receive, marked)

    async def _has_token(self, scope: Scope, headers: dict[str, str], send: Send) -> bool:
        """Whether a request carries the token; if it is in the address, it moves to a cookie."""
        assert self._token is not None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and hmac.compare_digest(given.encode(), self._token.encode()):
            cookie = f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, "", {"location": scope["path"], "set-cookie": cookie})
            return False
        told = headers.get("authorization", "").removeprefix("Bearer ")
        # not by http.cookies, which reads nothing where another program on this machine has left an odd one
        cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";"))
        for candidate in (told, cookies.get(COOKIE, "")):
            if hmac.compare_digest(candidate.encode(), self._token.encode()):
                return True
        await _answer(
            send, 401, "open the address that the node has printed, with its token", {"www-authenticate": "Bearer"}
        )
        return False


def _host(headers: dict[str, str]) -> str:
    """The name of the host that was asked for, without a port."""
    host = headers.get("host", "")
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


async def _answer(send: Send, status: int, text: str, headers: dict[str, str] | None = None) -> None:
    body = f"{text}\n".encode()
    told = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **(headers or {})}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(k.encode(), v.encode()) for k, v in told.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
