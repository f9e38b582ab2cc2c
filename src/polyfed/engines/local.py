"""The local engine: clients one after the other in this process, messages by reference."""

from __future__ import annotations

import time
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from pydantic import Field

from polyfed.core.activity import ClientStarted, report
from polyfed.core.errors import PayloadError
from polyfed.engines.engine import EngineSettings, Hosting
from polyfed.engines.site import Site
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Engine
from polyfed.wire.framing import pack, unpack
from polyfed.wire.limits import Frame
from polyfed.wire.messages import Answer, Cause, Failure, Request

_T = TypeVar("_T")
_M = TypeVar("_M", Request, Answer)


class InProcess(EngineSettings):
    """Steps execute in this process, one client after the other; nothing is copied between server and clients."""

    serialize: bool = Field(default=False, description="encode and decode every message as if it crossed a wire")

    def serve(self, hosting: Hosting, body: Callable[[Engine], _T]) -> _T:
        """Run ``body`` with an engine over a site in this process."""
        return body(LocalEngine(hosting.here(), serialize=self.serialize))


class LocalEngine:
    """Executes steps in-process; each reply is consumed before the next client starts.

    Args:
        site: Site of the clients.
        serialize: True to encode and decode every message as if it crossed a wire; results are the same bits.
    """

    def __init__(self, site: Site, *, serialize: bool = False) -> None:
        self.site, self.serialize = site, serialize

    def clients(self) -> tuple[ClientInfo, ...]:
        return self.site.infos

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        """Run the step client by client; see ``Engine.exchange``. Lateness is decided once a step has ended."""
        for request in requests:
            started = time.monotonic()
            report(ClientStarted(request.client, request.step))
            try:
                answer = self._crossed(self.site.answer(self._crossed(request)))
            except PayloadError as error:
                answer = Answer(request.client, failure=Failure(Cause.INVALID, str(error), error=error))
            if answer.failure is not None and isinstance(answer.failure.error, BdbQuit):
                raise KeyboardInterrupt from None  # leaving the debugger ends the run
            late = deadline is not None and time.monotonic() - started > deadline
            yield Answer.late(answer.client, deadline) if late else answer

    def _crossed(self, message: _M) -> _M:
        """The message as its receiver gets it: the same object, or one decoded from its encoded bytes."""
        if not self.serialize or message.payload is None:
            return message
        texts, frames = pack({"": message.payload}, checksums=True)
        copied = [Frame(frame.header, [memoryview(bytes(buffer)) for buffer in frame.buffers]) for frame in frames]
        return replace(message, payload=unpack(texts[""], copied, self.site.limits))
