"""Runs the service: a socket, the thread that follows the runs, and uvicorn.

The address is bound and printed before any log is read; the page fills while logs are indexed. When the server ends,
the feed disconnects its listeners first: streams never end by themselves, and uvicorn would wait for them.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import resource
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from hilbert_monitor.runs.reader import find_runs
from hilbert_monitor.service.following.cache import cache_folder
from hilbert_monitor.service.following.index import Index

from . import assets
from .app import create_app
from .connections import ACCEPTED, Connection, Connections, connection_limit, on_loop_error, quiet
from .notebook import Notebook, data_folder
from .security import LOOPBACK

PATIENCE = 0.2
"""Seconds that open answers have to finish when the server ends."""
FILES = 1 << 16
"""Files that the service may have open, if the system allows so many."""
COLLECT_AFTER = 20_000
"""Objects after which Python looks for garbage in cycles, in a process that only serves; by default 700."""
QUEUE = 1024
"""Connections that may wait to be accepted."""
SLOW = 0.5
"""Seconds of indexing after which a progress bar appears."""


class AddressError(OSError):
    """An address cannot be bound. The message says why and what to do."""


class Server(uvicorn.Server):
    """Uvicorn that ends at once although streams are open."""

    def __init__(
        self,
        index: Index,
        token: str | None,
        hosts: tuple[str, ...] | None,
        *,
        reexport: bool = False,
        notebook: Notebook | None = None,
    ) -> None:
        config = uvicorn.Config(
            create_app(index, token=token, allowed_hosts=hosts, reexport=reexport, notebook=notebook),
            log_level="warning",
            access_log=False,  # it would have tokens in it
            server_header=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            http=partial(Connection, pool=Connections(connection_limit())),  # type: ignore[arg-type]  # it is called
            backlog=ACCEPTED,
        )
        super().__init__(config)
        quiet("uvicorn.error")
        self._index = index
        threading.Thread(target=assets.prepare, name="hilbert-monitor page", daemon=True).start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Few connections are accepted at a time, but many may queue for it."""
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        await super().startup(sockets)
        for one in sockets or []:
            one.listen(QUEUE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Disconnect the listeners, give other answers a moment, and end."""
        self._index.feed.close()
        self.config.timeout_graceful_shutdown = PATIENCE  # type: ignore[assignment]  # a part of a second is fine too
        logging.getLogger("uvicorn.error").setLevel(
            logging.CRITICAL
        )  # it would report the answers that are cut off now
        await super().shutdown(sockets)


@dataclass(frozen=True, slots=True)
class Place:
    """The address at which a service listens, and its token."""

    socket: socket.socket
    host: str
    port: int
    token: str | None

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Host names that requests may use; None for any, as with a token."""
        return (*LOOPBACK, _in_link(self.host)) if self.token is None else None

    @property
    def address(self) -> str:
        """The address without the token."""
        return f"http://{_reachable(self.host)}:{self.port}/"

    @property
    def url(self) -> str:
        """The address to open, with the token if there is one."""
        return self.address + (f"?token={quote(self.token, safe='')}" if self.token else "")


def serve(
    root: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    show_token: bool = True,
    cache: bool | Path = True,
    data: bool | Path = True,
    reexport: bool = False,
    open_browser: bool = False,
    console: Console | None = None,
) -> None:
    """Serve the runs of a folder until Ctrl-C.

    Args:
        root: folder of the runs, or of one run; it may be created later.
        host: address to listen at. For one that others can reach a token is made, if none is given.
        port: port to listen at; 0 for any free one.
        token: the secret that a visitor must send.
        show_token: whether to print the link with the token in it; one that is made up here is always printed.
        cache: whether to store the tables of runs, which makes the next start quick; or the folder for them, by default
            the user's cache folder. Nothing is ever written into the folder of the runs.
        data: whether to keep notes, tags and acknowledgements; or the folder for them, by default the user's data
            folder.
        reexport: whether /metrics has the runs too that serve their metrics themselves.
        open_browser: whether to open the page.
        console: where to print the address.
    """
    console = console or Console(soft_wrap=True, highlight=False, markup=False)
    place = bind(host, port, token)
    _announce(place, root, console, show_token=show_token or token is None)
    _allow_open_files()
    index = _index(root, cache)
    server = Server(index, place.token, place.hosts, reexport=reexport, notebook=_notebook(index.root, data))
    _collect_less_often()
    index.start()
    if open_browser:
        threading.Thread(target=webbrowser.open, args=(place.url,), daemon=True).start()
    threading.Thread(target=_show_progress, args=(index, server, console), daemon=True).start()
    try:
        with suppress(KeyboardInterrupt):  # uvicorn raises it again once it has ended
            server.run(sockets=[place.socket])
    finally:
        index.stop()


@contextmanager
def background(
    root: Path, *, host: str = "127.0.0.1", port: int = 0, cache: bool | Path = True, data: bool | Path = True
) -> Iterator[Place]:
    """Serve the runs of a folder in threads of their own, until the block ends. Signals are left alone."""
    place = bind(host, port, None)
    index = _index(root, cache)
    server = Server(index, place.token, place.hosts, notebook=_notebook(index.root, data))
    thread = threading.Thread(target=server.run, args=([place.socket],), name="hilbert-monitor service", daemon=True)
    index.start()
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        yield place
    finally:
        server.should_exit = True
        thread.join()
        index.stop()


def bind(host: str, port: int, token: str | None) -> Place:
    """Bind an address. AddressError says why it cannot be. An address that others can reach gets a token."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise AddressError(f"there is no address '{host}' on this machine ({error}): give another --host") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(QUEUE)
    except (OSError, OverflowError) as error:
        bound.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise AddressError(
            f"port {port} of {host} cannot be bound ({reason}): end what uses it, or give another --port; --port 0"
            " takes any free one"
        ) from None
    if token is None and not _is_loopback(str(address[0])):
        token = secrets.token_urlsafe(24)
    return Place(bound, host, bound.getsockname()[1], token)


def _index(root: Path, cache: bool | Path) -> Index:
    folder = cache_folder(root, cache if isinstance(cache, Path) else None) if cache else None
    return Index(root, cache=folder)


def _notebook(root: Path, data: bool | Path) -> Notebook:
    if not data:
        return Notebook(None, "it was started with --read-only")
    return Notebook(data_folder(root, data if isinstance(data, Path) else None), "this user has no data folder")


def _allow_open_files() -> None:
    """Have as many files open as the system allows: each browser is one, and each table from the cache."""
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, FILES) if most >= 0 else FILES, most))


def _collect_less_often() -> None:
    """Look for garbage in cycles less often. Records have no cycles; looking at all of them was a tenth of reading."""
    gc.freeze()  # what is loaded by now stays
    gc.set_threshold(COLLECT_AFTER)


def _announce(place: Place, root: Path, console: Console, *, show_token: bool) -> None:
    console.print(f"hilbert-monitor serves '{root}' at {place.url if show_token else place.address}")
    if not root.is_dir():
        console.print(f"there is no folder '{root}' yet: its runs appear as soon as it does")
    elif nested := _nested_runs(root):
        console.print(f"there are no runs in '{root}', but in '{nested}': serve that folder to see them")
    if not show_token:
        console.print("its token is the one in the environment, and is not printed: add ?token=TOKEN to the address")
    elif place.token is not None and not _is_loopback(place.socket.getsockname()[0]):
        console.print("whoever has this link can see the runs; nobody else can")
    console.print("Ctrl-C ends it")


def _nested_runs(root: Path) -> Path | None:
    """The folder `runs` in a folder without runs, if it has some: the demo, for one, has its runs there."""
    nested = root / "runs"
    return nested if nested.is_dir() and find_runs(nested) and not find_runs(root) else None


def _show_progress(index: Index, server: Server, console: Console) -> None:
    """Show how much of the logs has been read, if that takes a while."""
    time.sleep(SLOW)
    if index.progress >= 1:
        return
    columns = (TextColumn("reading the run logs"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        while index.progress < 1 and not server.should_exit:
            progress.update(task, completed=index.progress)
            time.sleep(0.1)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _in_link(host: str) -> str:
    """An address as it is written in a link."""
    return f"[{host}]" if ":" in host else host


def _reachable(host: str) -> str:
    """A host name for a link: the machine's own name, if the service listens at all of its addresses."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else _in_link(host)
