"""The files of the page: each is read once and compressed once, and no other file is served."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from hilbert_monitor import __version__

from . import catalogue
from .response_cache import Body

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}
"""Media types of the files that are served, by the end of their names."""
PLOTLY = "plotly.min.js"
PAGE = "index.html"
NOT_IMPORTED = {"main.js", "worker.js", "chosen_theme.js", "early.js"}
"""Scripts that no other script imports."""
HINT = b"//# allFunctionsCalledOnLoad\n"
"""The first line of plotly's script as it is served. Browsers that know it compile the whole script while it arrives,
beside the page: in Chromium the page then waits 0.15 s for plotly to start, and 1.1 s without it."""
FOREVER = "public, max-age=31536000, immutable"


class Assets:
    """The files of the page by name. A hash of all of them replaces __VERSION__ in their texts."""

    def __init__(self) -> None:
        folder = files(__package__).joinpath("static")
        known = {file.name: file.read_bytes() for file in folder.iterdir() if Path(file.name).suffix in TYPES}
        known[catalogue.NAME] = catalogue.script()
        self.version = _hash(
            __version__.encode(), HINT, str(_plotly().stat().st_size).encode(), *map(_hash_of, sorted(known.items()))
        )
        known[PAGE] = known[PAGE].replace(b"__MODULES__", _preloads(known))
        self._bodies = {name: Body(_versioned(name, content, self.version), 9) for name, content in known.items()}
        self._runbooks = {path.stem: Body(path.read_bytes(), 9) for path in _runbooks()}

    def get(self, name: str) -> Body | None:
        """A file, if there is one of that name."""
        return _plotly_body() if name == PLOTLY else self._bodies.get(name)

    def answer(self, request: Request, name: str) -> Response | None:
        """The response to a request for a file. A browser that asked for this very version may cache it for ever.

        The version is a folder in the address, so that scripts which import each other by relative names ask for it
        too: none of them has to be validated when the page is opened again.
        """
        body = self.get(name)
        if body is None:
            return None
        headers = {
            "ETag": f'"{self.version}-{_hash(name.encode())[:8]}"',
            "Cache-Control": FOREVER if request.path_params.get("version") == self.version else "no-cache",
            "Vary": "Accept-Encoding",
        }
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return respond(request, body, TYPES[Path(name).suffix], headers)

    def runbook(self, request: Request, name: str) -> Response | None:
        """The runbook of an alert, as text."""
        body = self._runbooks.get(name)
        return None if body is None else respond(request, body, "text/plain; charset=utf-8")


def prepare() -> None:
    """Compress plotly's script before somebody waits for it."""
    _ = _plotly_body().gzipped


def respond(request: Request, body: Body, media_type: str, headers: dict[str, str] | None = None) -> Response:
    """A response with a body, compressed if the client accepts that."""
    headers = {"Vary": "Accept-Encoding"} | (headers or {})
    if "gzip" in request.headers.get("accept-encoding", "") and body.gzipped is not None:
        return Response(body.gzipped, media_type=media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(body.content, media_type=media_type, headers=headers)


@cache
def _plotly_body() -> Body:
    return Body(HINT + _plotly().read_bytes(), 6)


def _plotly() -> Path:
    """The path of plotly's script in its package, found without importing that."""
    spec = find_spec("plotly")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "package_data", PLOTLY)


def _runbooks() -> list[Path]:
    """The runbooks: in the package, or beside it in a checkout."""
    here = Path(__file__).parent
    folders = (here / "runbooks", here.parents[2] / "dashboards" / "runbooks")
    return next((paths for folder in folders if (paths := sorted(folder.glob("*.md")))), [])


def _preloads(names: Iterable[str]) -> bytes:
    """Links by which a browser fetches all modules at once, and not each when another has named it."""
    modules = sorted(name for name in names if name.endswith(".js") and name not in NOT_IMPORTED)
    return "\n".join(f'<link rel="modulepreload" href="/static/__VERSION__/{name}">' for name in modules).encode()


def _versioned(name: str, content: bytes, version: str) -> bytes:
    return (
        content.replace(b"__VERSION__", version.encode()) if TYPES[Path(name).suffix].startswith("text/") else content
    )


def _hash_of(item: tuple[str, bytes]) -> bytes:
    return f"{item[0]} {_hash(item[1])}".encode()


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]
