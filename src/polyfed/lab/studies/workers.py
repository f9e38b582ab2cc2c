"""Cells side by side: a process each, so that one that fails, or is killed, takes no other with it."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Literal

from polyfed.core.activity import heard_by
from polyfed.core.errors import PolyfedError
from polyfed.lab.studies.execution import Order, execute
from polyfed.runs.events import Callback, Callbacks, Event, Preparing

_LOG = ".log"
_AT_WORK = "at work"
_EVERY = 0.5  # seconds between two texts of a cell
# what nearly every cell imports: it takes seconds of CPU, once an invocation instead of once a cell
_PRELOADED = [
    "polyfed.lab.studies.execution",
    "polyfed.algorithms.creamfl",
    "pandas",
    "pyarrow",
    "transformers.models.resnet.modeling_resnet",
    "transformers.models.vit.modeling_vit",
    "transformers.models.bert.modeling_bert",
]

Ending = Literal["done", "failed", "no space"]


@dataclass(frozen=True)
class CellOutcome:
    """How a cell ended.

    Attributes:
        key: of the cell.
        ending: done, failed, or no space on the disk.
        cause: why it is not done, one line.
        seconds: wall time.
    """

    key: str
    ending: Ending
    cause: str = ""
    seconds: float = 0.0


@dataclass
class Workers:
    """Up to ``jobs`` processes.

    Attributes:
        jobs: at once.
        gpus: number of GPUs, dealt out in turn; 0: none.
    """

    jobs: int
    gpus: int = 0
    _running: dict[str, tuple[ForkServerProcess, Connection, float, int]] = field(default_factory=dict)
    _activities: dict[str, str] = field(default_factory=dict)

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    @property
    def is_free(self) -> bool:
        return len(self._running) < self.jobs

    def start(self, key: str, order: Order) -> None:
        context = _context()
        receiver, sender = context.Pipe(duplex=False)
        taken = {slot for *_, slot in self._running.values()}
        slot = next(number for number in range(self.jobs) if number not in taken)
        gpu = str(slot % self.gpus) if self.gpus else None
        process = context.Process(target=_work, args=(order, sender, gpu))
        process.start()
        sender.close()  # so that a process that is killed ends the connection
        self._running[key] = (process, receiver, time.monotonic(), slot)

    def activity(self, key: str) -> str:
        """What a cell prepares, such as ``encoding cifar100: 3,200 of 24,000``; empty while it trains."""
        return self._activities.get(key, "")

    def wait(self, timeout: float) -> list[CellOutcome]:
        """The cells that end within so many seconds; it returns with the first that says something."""
        ready = wait([receiver for _, receiver, *_ in self._running.values()], timeout)
        heard = [self._heard(key) for key, (_, receiver, *_) in list(self._running.items()) if receiver in ready]
        return [outcome for outcome in heard if outcome is not None]

    def _heard(self, key: str) -> CellOutcome | None:
        """How a cell ended; None if it says what it does."""
        process, receiver, begun, _ = self._running[key]
        try:
            ending, text = receiver.recv()
        except EOFError:  # it was killed, or ended without a word
            process.join()
            ending, text = "failed", f"its process ended with code {process.exitcode}; was there too little memory?"
        if ending == _AT_WORK:
            self._activities[key] = text
            return None
        del self._running[key]
        self._activities.pop(key, None)
        process.join()
        receiver.close()
        return CellOutcome(key, ending, text, time.monotonic() - begun)

    def stop(self) -> None:
        """End all that run; each can be resumed."""
        for process, receiver, *_ in self._running.values():
            process.terminate()
            receiver.close()
        for process, *_ in self._running.values():
            process.join()
        self._running.clear()


@contextlib.contextmanager
def stopped_at_end(workers: Workers) -> Iterator[Workers]:
    """The workers; whatever ends the block ends them."""
    try:
        yield workers
    finally:
        workers.stop()


def _context() -> multiprocessing.context.ForkServerContext:
    # a process that is forked from one which has only imported: no import to wait for, and no threads to inherit
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


# ---- in the process of a cell


class Told(Callback):
    """Says through a pipe what a cell prepares, and when it is at work again."""

    def __init__(self, sender: Connection) -> None:
        self._sender, self._last, self._when = sender, "", 0.0

    def handle(self, event: Event) -> None:
        text = ""
        if isinstance(event, Preparing):
            text = f"{event.what}: {event.done:,} of {event.total:,}" if event.total else event.what
        now = time.monotonic()
        if text != self._last and (now - self._when >= _EVERY or not text):
            self._last, self._when = text, now
            self._sender.send((_AT_WORK, text))


def _work(order: Order, sender: Connection, gpu: str | None) -> None:
    _end_with_parent()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    order.folder.parent.mkdir(parents=True, exist_ok=True)
    log = order.folder.with_name(order.folder.name + _LOG)
    try:
        with log.open("a") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            told = Told(sender)
            with heard_by(Callbacks([told])):
                execute(order, [told])
    except BaseException as error:  # whatever it is, the other cells go on
        with contextlib.suppress(OSError), log.open("a") as stream:
            traceback.print_exc(file=stream)
        sender.send(_reason(error))
        return
    log.unlink(missing_ok=True)
    sender.send(("done", ""))


def _reason(error: BaseException) -> tuple[Ending, str]:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return "no space", f"no space left on the disk ({cause.filename or 'writing'})"
        cause = cause.__cause__
    text = str(error) if isinstance(error, PolyfedError) else f"{type(error).__name__}: {error}"
    return "failed", " ".join(text.split())


def _end_with_parent() -> None:
    """A cell must not go on behind the back of a study that was killed and started again."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
