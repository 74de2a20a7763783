"""The outputs of a run: its log, sinks and metrics, the texts of tokens, and the actions on a blow-up.

Each sink has a queue and a thread, so training never waits for a file system or a server.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from hilbert_monitor.runs.alerts import with_texts
from hilbert_monitor.runs.exposition import RunSamples
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.process_bound import ProcessBound, end_child
from hilbert_monitor.runs.reader import STALLED_AFTER
from hilbert_monitor.runs.record import Alert, LayerRecord, RunInfo, StepRecord

from .prometheus import Exporter, Prometheus
from .runtime import Guard, describe, warn_user

if TYPE_CHECKING:
    from .session import MonitorOptions, TrainingLoop

T = TypeVar("T", contravariant=True)
Item = TypeVar("Item")
LogItem = StepRecord | Alert | LayerRecord | RunInfo | bytes | None
"""What the log takes. Bytes are the panel, None is a heartbeat."""

HEARTBEAT = 10.0  # seconds between two heartbeats while the run makes no step
CLOSE = 5.0  # seconds that all sinks together have to finish at the end of a run
PATIENCE = 1.0  # seconds that a record waits for the texts of its tokens
BRIEF_PATIENCE = 0.1  # seconds that training waits for the texts of an alert
SLOW = 1.0  # seconds that a user's function may take on a blow-up without a warning
CHECKPOINTS = 3  # blow-ups of a run that get a checkpoint
PAIRS = ("pair", "perturbation_pair")  # fields with two token ids; `pair_text` has the texts of `pair`


@runtime_checkable
class Sink(Protocol[T]):
    """Takes records. A sink that raises or is slow costs records, never the run.

    A later record of the same step replaces the earlier one, for instance once the validation loss is known.
    """

    def write(self, record: T) -> None:
        """Take one record."""


class QueuedSink(ProcessBound, Generic[Item]):
    """Writes to a sink in a thread, through a bounded queue. A forked child cannot use it.

    Args:
        sink: the sink.
        name: its name in warnings.
        room: records that may wait. Further ones are dropped and counted.
        prepare: changes each record in the thread, before the sink gets it.
    """

    def __init__(
        self, sink: Sink[Item], *, name: str = "", room: int = 1024, prepare: Callable[[Item], Item] | None = None
    ) -> None:
        self.sink, self.name, self._room, self._prepare = sink, name or type(sink).__name__, room, prepare
        self.failures = self.dropped = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"hilbert-monitor {self.name}", daemon=True)
        self.bind_to_process()
        self._thread.start()

    def write(self, record: Item) -> None:
        """Queue a record, or drop it if the sink has fallen behind."""
        if self.inherited:
            return
        if self._jobs.qsize() < self._room:
            self._jobs.put(partial(self._write, record))
            return
        self.dropped += 1
        if self.dropped == 1:
            warn_user(f"{self.name} has fallen behind, records are dropped")

    def end(self, last: Callable[[], None] | None = None) -> None:
        """End the thread once it has written all records and called `last`. Does not wait for it."""
        if not self.inherited:
            self._jobs.put(last)
            self._jobs.put(None)

    def join(self, timeout: float = CLOSE) -> None:
        """Wait for the thread after `end`. Warn if it is still busy."""
        if self.inherited:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            warn_user(f"{self.name} is still busy at the end of the run, its last records may be lost")

    def _write(self, record: Item) -> None:
        self.sink.write(record if self._prepare is None else self._prepare(record))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # user code may panic or exit; signals go to the main thread
                if self.inherited:
                    end_child(error)
                self.failures += 1
                if self.failures == 1:
                    warn_user(f"{self.name} failed ({describe(error)}); training goes on", stacklevel=1)
            if self.inherited:  # a child that the sink forked
                end_child()


class RunLog:
    """The run's folder on disk. The first item opens it; while that fails, every later one tries again.

    The arguments are those of `RunWriter.open`.
    """

    def __init__(self, root: str, **options: Any) -> None:
        self._open: Callable[[RunInfo], RunWriter] = lambda info: RunWriter.open(root, info, **options)
        self._info = RunInfo()
        self.writer: RunWriter | None = None
        """The open folder."""

    def write(self, record: LogItem) -> None:
        """Write one item."""
        if isinstance(record, RunInfo):
            before, after = msgspec.structs.asdict(self._info), msgspec.structs.asdict(record)
            self._info = record
            if self.writer is not None:
                self.writer.describe(**{name: value for name, value in after.items() if value != before[name]})
        if self.writer is None:
            self.writer = self._open(self._info)
        if isinstance(record, StepRecord):
            self.writer.write(record)
        elif isinstance(record, Alert):
            self.writer.alert(record)
        elif isinstance(record, LayerRecord):
            self.writer.layers(record)
        elif isinstance(record, bytes):
            self.writer.panel(record)
        elif record is None:
            self.writer.progress()

    def close(self, error: BaseException | None = None, *, stopped: str = "") -> None:
        """Write how the run ended."""
        if self.writer is not None:
            self.writer.close(error, stopped=stopped)


class Webhook:
    """Posts alerts as JSON: a "text", as Slack and others take it, the name that `run` returns, and the alert."""

    def __init__(self, url: str, *, run: Callable[[], str] = str) -> None:
        self.url, self.run = url, run

    def write(self, record: Alert) -> None:
        """Post one alert. Raise if the server does not accept it in ten seconds."""
        run = self.run()
        text = f"hilbert-monitor: {f'run {run}, ' if run else ''}step {record.step}: {record.message}"
        body = msgspec.json.encode({"text": text, "run": run, "alert": record})
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10.0):
            pass


class TokenTexts(ProcessBound):
    """The texts of tokens. The user's `decode` runs once per token, in the thread of a `QueuedSink` of tokens.

    So a `decode` that is slow, fails or hangs costs texts, but neither records nor time.
    """

    def __init__(self, decode: Callable[[int], str] | None, guard: Guard) -> None:
        self.decode, self.guard = decode, guard
        self.error: BaseException | None = None
        """The first exception of `decode`."""
        self._asked: dict[int, float] = {}  # when `ask` queued each token; the system's clock may be set back
        self._texts: dict[int, str | None] = {}  # None if `decode` failed
        self._changed = threading.Condition()
        self._queue: QueuedSink[int] | None = None
        self.bind_to_process()

    def ask(self, item: StepRecord | Alert) -> None:
        """Queue the tokens of a record or an alert. Does not wait for their texts."""
        if self.decode is None or self.inherited:
            return
        if self._queue is None:
            self._queue = QueuedSink(self, name="decode", room=65_536)
        for token in [token for pair in _pairs(item).values() for token in pair]:
            if token not in self._asked:
                self._asked[token] = time.monotonic()
                self._queue.write(token)

    def write(self, record: int) -> None:
        """Decode one token, as the sink of the queue."""
        assert self.decode is not None
        text = None
        try:
            text = str(self.decode(record))
        except BaseException as error:  # user code may panic or exit
            if self.inherited:
                raise
            self.error = self.error or error
            self.guard.count("decode", error)
        if not self.inherited:
            with self._changed:
                self._texts[record] = text
                self._changed.notify_all()

    def complete(self, item: Item, patience: float | None = None) -> Item:
        """Return a record or an alert with its texts, unless they are not known `patience` seconds after `ask`."""
        pairs = {} if self.decode is None or self.inherited else _pairs(item)
        tokens = {token for pair in pairs.values() for token in pair}
        if not tokens:
            return item
        end = max(self._asked.get(token, 0.0) for token in tokens) + (PATIENCE if patience is None else patience)
        with self._changed:
            self._changed.wait_for(lambda: tokens <= self._texts.keys(), end - time.monotonic())
            both = {f"{name}_text": tuple(map(self._texts.get, pair)) for name, pair in pairs.items()}
        texts: dict[str, Any] = {name: pair for name, pair in both.items() if None not in pair}
        if isinstance(item, Alert):
            return with_texts(item, texts["pair_text"]) if texts else item  # type: ignore[return-value]
        return msgspec.structs.replace(item, **texts)  # type: ignore[type-var]

    def close(self) -> None:
        """End the thread once `decode` returns."""
        if self._queue is not None:
            self._queue.end()


def _pairs(item: Any) -> dict[str, tuple[int, int]]:
    """Return the pairs of tokens whose texts are missing, by their fields."""
    if not isinstance(item, StepRecord | Alert):
        return {}
    pairs = {name: getattr(item, name, None) for name in PAIRS}
    return {name: pair for name, pair in pairs.items() if pair and getattr(item, f"{name}_text") is None}


class RunOutputs:
    """Everything that one run writes. Every rank has one, since some actions take all ranks; rank zero opens it."""

    def __init__(self, loop: TrainingLoop, options: MonitorOptions, guard: Guard) -> None:
        self.loop, self.options, self.guard = loop, options, guard
        self.exporter: Exporter | None = None
        self._log: RunLog | None = None
        self._log_queue: QueuedSink[Any] | None = None
        self._sinks: list[QueuedSink[Any]] = []
        self._texts = TokenTexts(options.decode, guard)
        self._actions = BlowUpActions(options.actions, guard, self._texts, run=lambda: self.id)
        self._info, self._heartbeat = RunInfo(), 0.0
        self._pages: list[Alert] = []  # on which all ranks have not acted yet
        self.alone = ""
        """Why ranks cannot act together, or empty."""

    @property
    def id(self) -> str:
        """Name of the run's folder, once it is open."""
        return "" if self._writer is None else self._writer.id

    @property
    def _writer(self) -> RunWriter | None:
        return None if self._log is None else self._log.writer

    def open(self, info: RunInfo, *, first_step: int) -> None:
        """Open the sinks, the log and the exporter."""
        options, strict, complete = self.options, self.guard.strict, self._texts.complete
        self._sinks = [QueuedSink(sink, prepare=complete) for sink in options.sinks]
        if options.run_dir is not None and self.loop.keeps_log:
            self._log = RunLog(options.run_dir, first_step=first_step, strict=strict, private=options.advanced.private)
            if strict:
                self._log.write(info)  # here, to raise if that fails
            self._log_queue = QueuedSink(self._log, name="the run log", room=8192, prepare=complete)
        else:
            host, pid = socket.gethostname(), os.getpid()
            id = info.id or info.name or f"{host}-{pid}"
            self._info = info = msgspec.structs.replace(info, id=id, host=host, pid=pid, started=time.time())
        with self.guard("exporter"):
            if isinstance(options.prometheus, Prometheus):
                stalled_after = STALLED_AFTER if info.stalled_after is None else info.stalled_after
                samples = RunSamples(self._about, failures=self.failures, stalled_after=stalled_after)
                self.exporter = Exporter(samples, options.prometheus)
        self.describe(info)

    def describe(self, info: RunInfo) -> None:
        """Write what is now known of the run."""
        if self.exporter is not None and self.exporter.port is not None:
            settings = self.exporter.settings
            scheme = "http" if settings.tls is None else "https"
            info = msgspec.structs.replace(info, port=self.exporter.port, address=settings.address, scheme=scheme)
        self.write_log(info)

    def write(self, record: StepRecord, alerts: list[Alert], *, behind: int = 0, final: bool) -> None:
        """Write a record with its alerts on rank zero, and do what that does alone on pages.

        An accelerator's records come `behind` steps later. After a `final` one there is no next step.
        """
        if self.loop.ranks.rank != 0:
            return
        with self.guard("outputs"):
            self.put(record, alerts)
        with self.guard("loggers"):
            self.loop.log(record, behind=behind, final=final)
        pages = [alert for alert in alerts if alert.severity == "page"]
        self._actions.on_rank_zero(pages)
        self._pages += pages

    def act(self, step: int) -> None:
        """Do what all ranks do on pages since the last call. Called on every rank after every update."""
        pages, self._pages = self._pages, []
        if self.alone:
            return
        folder = self.loop.folder if self._writer is None else self._writer.folder
        self._actions.on_all_ranks(self.loop, pages, os.path.join(folder, f"blow-up-step-{step}.ckpt"))

    def put(self, record: StepRecord, alerts: Sequence[Alert] = ()) -> None:
        """Give a record and its alerts to the log, the exporter and the sinks."""
        if self.loop.label:
            record = msgspec.structs.replace(record, head=self.loop.label)
        items: tuple[StepRecord | Alert, ...] = (record, *alerts)
        for item in items:
            self._texts.ask(item)
            if self.exporter is not None:
                self.exporter.samples.write(item)
            self.write_log(item)
        for sink in self._sinks:
            sink.write(record)

    def write_log(self, item: LogItem) -> None:
        """Write one item to the log alone."""
        if self._log_queue is not None:
            self._log_queue.write(item)

    def alive(self) -> None:
        """Write a heartbeat, unless one was written in the last ten seconds."""
        if time.monotonic() > self._heartbeat + HEARTBEAT:
            self._heartbeat = time.monotonic()
            if self.exporter is not None:
                self.exporter.samples.alive()
            self.write_log(None)

    def failures(self) -> Counter[str]:
        """Return how often each part of the monitor failed, and how often each sink failed or dropped a record."""
        failures = Counter(self.guard.failures)
        for sink in self._queues():
            failures[sink.name] += sink.failures + sink.dropped
        return failures

    def close(self, error: BaseException | None = None, *, stopped: str = "") -> None:
        """Write how the run ended: by `error`, by the signal `stopped`, or by itself. Sinks have `CLOSE` seconds."""
        deadline, log = time.monotonic() + CLOSE, self._log
        if log is not None and self._log_queue is not None:
            self._log_queue.end(lambda: log.close(error, stopped=stopped))
        with self.guard("exporter"):
            if self.exporter is not None:
                self.exporter.end("stopped" if stopped else "failed" if error is not None else "finished")
        for sink in self._queues():
            sink.end()
        for sink in self._queues():
            sink.join(max(0.1, deadline - time.monotonic()))
        self._texts.close()
        if error is None and self.guard.strict and self._texts.error is not None:
            raise self._texts.error

    def _about(self) -> RunInfo:
        return self._info if self._writer is None else self._writer.info

    def _queues(self) -> list[QueuedSink[Any]]:
        return [*([] if self._log_queue is None else [self._log_queue]), *self._sinks, *self._actions.webhooks]


Action = str | Callable[[Alert], Any]
ON_ALL_RANKS = ("checkpoint", "stop")
"""Actions on a blow-up that all ranks take together."""


def action_of(action: Any) -> Any:
    """Return an action on a blow-up, or the function of that name."""
    is_address = isinstance(action, str) and action.startswith(("http://", "https://"))
    if is_address or callable(action) or action in ("warn", *ON_ALL_RANKS):
        return action
    place, _, name = action.rpartition(".") if isinstance(action, str) else ("", "", "")
    why = ""
    if place:
        try:
            function = getattr(import_module(place), name, None)
        except Exception as error:  # the import runs code of the user
            function, why = None, f" ({type(error).__name__}: {error})"
        if callable(function):
            return function
    raise ValueError(
        'on_blowup takes "warn", "checkpoint", "stop", an http address, or a function of the alert or its full'
        f" name, got {action!r}{why}"
    )


class BlowUpActions:
    """Acts on pages as the user chose. `run` returns the name of the run for webhooks."""

    def __init__(self, actions: Sequence[Action], guard: Guard, texts: TokenTexts, run: Callable[[], str]) -> None:
        self.guard, self.texts = guard, texts
        self._functions = [action for action in actions if callable(action)]
        self._words = {action for action in actions if isinstance(action, str)}
        hooks = [Webhook(word, run=run) for word in sorted(self._words - {"warn", *ON_ALL_RANKS})]
        self.webhooks = [QueuedSink(hook, name="the webhook", room=64, prepare=texts.complete) for hook in hooks]
        self._checkpoints, self._stopped, self._slow = 0, False, False

    def on_rank_zero(self, alerts: Sequence[Alert]) -> None:
        """Post alerts, warn of them and give them to the user's functions."""
        for alert in alerts:
            for webhook in self.webhooks:
                webhook.write(alert)
            if "warn" in self._words:
                warn_user(f"step {alert.step}: {self.texts.complete(alert, BRIEF_PATIENCE).message}")
            for function in self._functions:
                with self.guard("response to a blow-up", user_code=True):
                    self._call(function, self.texts.complete(alert, BRIEF_PATIENCE))

    def on_all_ranks(self, loop: TrainingLoop, alerts: Sequence[Alert], path: str) -> None:
        """Save a checkpoint and stop training, if rank zero has alerts."""
        if not self._words.intersection(ON_ALL_RANKS) or not loop.ranks.from_rank_zero(bool(alerts)):
            return
        if "checkpoint" in self._words and self._checkpoints < CHECKPOINTS:
            self._checkpoints += 1
            checkpoint = None
            with self.guard("checkpoint of a blow-up"):
                checkpoint = loop.make_checkpoint()
            if loop.ranks.all_agree(checkpoint is not None):  # no rank waits for one that failed
                with self.guard("checkpoint of a blow-up"):
                    loop.save_checkpoint(checkpoint, path)
        if "stop" in self._words:
            loop.stop()
            if alerts and not self._stopped:
                alert, self._stopped = self.texts.complete(alerts[0], BRIEF_PATIENCE), True
                why = "" if "warn" in self._words else f": {alert.message}"
                warn_user(f'step {alert.step}: stopping training (on_blowup="stop"){why}')

    def _call(self, function: Callable[[Alert], Any], alert: Alert) -> None:
        """Call a function in the training step, as it may act on the trainer. Warn of the first slow call."""
        start = time.perf_counter()
        try:
            function(alert)
        finally:
            seconds = time.perf_counter() - start
            if seconds > SLOW and not self._slow:
                self._slow = True
                name = getattr(function, "__qualname__", type(function).__name__)
                warn_user(f"{name}, a response to a blow-up, took {seconds:.1f} s, and training waited for it")
