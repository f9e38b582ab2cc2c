"""The local engine: clients one after the other in this process, messages by reference."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

from polyfed.engines.site import Site
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Answer
from polyfed.federation.payload import Payload, decode, encode

log = logging.getLogger(__name__)


class LocalEngine:
    """Executes steps in-process; each reply is consumed before the next client starts.

    Args:
        site: where the clients live.
        serialize: encode and decode every message as if it crossed a wire; results are the same bits.
    """

    def __init__(self, site: Site, *, serialize: bool = False) -> None:
        self.site = site
        self.serialize = serialize

    def clients(self) -> tuple[ClientInfo, ...]:
        """Everybody in the federation."""
        return self.site.infos

    def exchange(
        self,
        step: str,
        round_number: int,
        phase: int,
        payloads: Mapping[str, Payload],
        deadline: float | None,
    ) -> Iterator[Answer]:
        """Run the step client by client; see ``Engine.exchange``."""
        for client_id, payload in payloads.items():
            started = time.monotonic()
            answer = self._answer(client_id, step, round_number, phase, payload)
            late = time.monotonic() - started
            if deadline is not None and late > deadline:
                answer = Answer(client_id, error=f"no answer within {deadline:g} s")
            yield answer

    def _answer(self, client_id: str, step: str, round_number: int, phase: int, payload: Payload) -> Answer:
        try:
            reply = self.site.handle(client_id, step, round_number, phase, self._wire(payload))
            return Answer(client_id, self._wire(reply))
        except Exception as error:
            log.debug("client %s failed in step %s", client_id, step, exc_info=True)
            return Answer(client_id, error=f"{type(error).__name__}: {error}")

    def _wire(self, payload: Payload) -> Payload:
        return decode(encode(payload)) if self.serialize else payload
