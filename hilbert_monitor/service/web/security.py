"""Access control: which requests are answered, and what a browser may do with the answers.

Without a token the service answers only requests that use a host name of this machine. That keeps out pages elsewhere
whose name was made to point here (DNS rebinding). With a token, every request but /healthz must have it. A browser
sends the token once, in a link. It gets a cookie and is redirected to the address without the token, so that the token
is in no history, no referrer and no screenshot.

The cookie is SameSite=Lax. Following a link changes nothing, so a link from elsewhere can do no harm. With Strict, a
colleague who has the cookie and follows a link in a chat would be refused.

A request that changes something (any method but GET and HEAD) must come from a page of this very origin, or from a
program, must be JSON, which no form of another page can send, and must say how long it is. Without a token it must come
from this machine.
"""

from __future__ import annotations

import hmac
import html
import ipaddress
from collections.abc import Collection
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Host names by which a machine reaches itself."""
OPEN = "/healthz"
"""The path that is answered without a token."""
SAFE = ("GET", "HEAD")
"""Methods that change nothing."""
LARGEST = 1 << 19
"""Bytes of a request that changes something, at most."""
LONGEST_COOKIE = 1 << 14
"""Letters of the header Cookie, at most. Browsers send the cookies of all services of a host."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:;"
        " base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer."""


def error_response(scope: Scope, status: int, sentence: str) -> Response:
    """An error in a sentence: JSON for paths of the API, a short page for others."""
    path: str = scope["path"]
    if path.startswith("/api") or path == OPEN:
        return JSONResponse({"detail": sentence}, status)
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{status}</title><p>{html.escape(sentence)}</p>'
    return HTMLResponse(page, status)


def protect(headers: MutableHeaders, path: str) -> None:
    """Add the headers that every answer has."""
    for name, value in HEADERS.items():
        headers[name] = value
    if path.startswith("/api") or path == OPEN:
        headers["Cache-Control"] = "no-store"


class AccessControl:
    """Middleware that checks the host name and the token of a request, and adds headers to the answer.

    Args:
        app: the app behind it.
        token: the secret that a visitor must send; None for no secret.
        hosts: host names that requests may use, without a port; None for any.
    """

    def __init__(self, app: ASGIApp, token: str | None = None, hosts: Collection[str] | None = LOOPBACK) -> None:
        self.app, self.hosts = app, None if hosts is None else {host.lower() for host in hosts}
        self._token = None if token is None else token.encode()
        self._ticket = "" if token is None else hmac.digest(token.encode(), b"hilbert-monitor cookie", "sha256").hex()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on to the app."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                protect(MutableHeaders(scope=message), scope["path"])
            await send(message)

        answer = self._refusal(scope, Headers(scope=scope)) or self.app
        await answer(scope, receive, protected)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The refusal of a request, or None to proceed."""
        host = _name(headers.get("host", ""))
        if self.hosts is not None and host not in self.hosts:
            return error_response(
                scope,
                400,
                f"This service answers to {', '.join(sorted(self.hosts))} and not to '{host[:100]}': open it under one"
                " of these names, or start it with --token to have it under any.",
            )
        if self._token is not None and scope["path"] != OPEN:
            refusal = self._token_refusal(scope, headers, self._token)
            if refusal is not None:
                return refusal
        return None if scope["method"] in SAFE else self._change_refusal(scope, headers)

    def _change_refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The refusal of a request that changes something, or None to proceed."""
        if self._token is None and not _is_this_machine(scope):
            return error_response(
                scope, 403, "Without a token, only this machine may change something: start the service with --token."
            )
        site, origin, host = (headers.get(name, "") for name in ("sec-fetch-site", "origin", "host"))
        if site not in ("", "same-origin") or (origin and origin.partition("://")[2].lower() != host.lower()):
            return error_response(
                scope,
                403,
                f"This request comes from another page ({(origin or site)[:100]}): only pages of this service, and"
                " programs, may change something. A proxy in between has to pass on the header Host.",
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return error_response(
                scope, 415, f"A change is sent with 'Content-Type: application/json', not '{kind[:100]}'."
            )
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            return error_response(scope, 411, "A change is sent with its 'Content-Length'.")
        if len(length) > 18 or int(length) > LARGEST:
            return error_response(
                scope, 413, f"A change has at most {LARGEST:,} bytes, not {length[:30]}: send it in parts."
            )
        return None

    def _token_refusal(self, scope: Scope, headers: Headers, token: bytes) -> Response | None:
        """The refusal of a request without the token, or the redirection of one with it in its address."""
        name = f"hilbert_monitor_{(scope.get('server') or ('', 0))[1]}"
        kind, _, secret = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(secret.strip().encode("latin-1"), token):
            return None
        cookies = ";".join(headers.getlist("cookie"))  # a proxy of HTTP/2 may pass on several
        if len(cookies) > LONGEST_COOKIE:
            return error_response(
                scope, 431, f"The header Cookie has more than {LONGEST_COOKIE:,} letters: delete cookies of this host."
            )
        if any(hmac.compare_digest(value.encode(), self._ticket.encode()) for value in _values(cookies, name)):
            return self._redirection(scope)
        if any(hmac.compare_digest(value.encode(), token) for key, value in _query(scope) if key == "token"):
            answer = self._redirection(scope)
            assert answer is not None
            answer.set_cookie(name, self._ticket, path="/", httponly=True, samesite="lax")
            return answer
        answer = error_response(
            scope,
            401,
            "This service needs its token: open the link that 'hilbert-monitor serve' printed when it started, which"
            " ends with ?token=..., or send the header 'Authorization: Bearer TOKEN'.",
        )
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def _redirection(self, scope: Scope) -> Response | None:
        """A redirection to the same address without the token; None if the address has no token."""
        rest = [(key, value) for key, value in _query(scope) if key != "token"]
        if len(rest) == len(_query(scope)):
            return None
        path = "/" + quote(scope["path"].lstrip("/\\"))  # two slashes would be another server
        answer = Response(status_code=303)
        answer.headers["Location"] = path + (f"?{urlencode(rest)}" if rest else "")
        answer.headers["Cache-Control"] = "no-store"
        return answer


def _is_this_machine(scope: Scope) -> bool:
    """Whether a request was sent from this machine."""
    try:
        return ipaddress.ip_address((scope.get("client") or ("", 0))[0].partition("%")[0]).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """A Host header without its port."""
    address, closed, _ = host.lower().partition("]")
    return address + closed if closed else address.partition(":")[0]


def _query(scope: Scope) -> list[tuple[str, str]]:
    text = scope.get("query_string", b"").decode("latin-1")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=200, errors="replace")
    except ValueError:
        return []


def _values(cookies: str, name: str) -> list[str]:
    """Return the values that the cookie of a name has.

    The standard library's parser takes quadratic time for escaped quotes. Our cookie is hex and needs no parser.
    """
    pairs = (part.strip().partition("=") for part in cookies.split(";"))
    return [value for key, _, value in pairs if key == name]
