"""Time as it was in another run: the replies of a deployment in the order in which they came, in a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.core.untrusted import file_json, typed
from polyfed.federation.client import ClientInfo
from polyfed.federation.timeline import Exchange, Job, Timeline, done_at
from polyfed.federation.timeline_events import OPENED, STARTED, TimelineEvent
from polyfed.federation.times import ClientTimes
from polyfed.wire.messages import Answer, Request

_Key = tuple[str, int]


@dataclass(kw_only=True)
class ReplayedTime(Timeline):
    """Virtual time in which clients reply when they did.

    Attributes:
        told: client and round in which it was asked -> what came of it.
        opened: round -> when it was opened; empty for virtual time.
    """

    told: Mapping[_Key, TimelineEvent]
    opened: Mapping[int, TimelineEvent]

    @classmethod
    def read(cls, path: Path, clients: Sequence[ClientInfo]) -> Self:
        """The times in the ``pace.jsonl`` of a run of these clients.

        Raises:
            ConfigError: it cannot be read, or is of other clients.
        """
        try:
            content = path.read_text(encoding="utf-8").splitlines()
            lines = [typed(TimelineEvent, file_json(line)) for line in content]
        except (OSError, ValueError) as error:
            raise ConfigError(f"run.pace.replay: '{path}' cannot be read: {error}") from error
        times = {client.id: ClientTimes(seconds=1) for client in clients}
        others = sorted({line.client for line in lines if line.event != OPENED} - times.keys())
        if others or not lines:
            whose = f"is of a run with client '{others[0]}', who is not here" if others else "has no replies"
            raise ConfigError(f"run.pace.replay: '{path}' {whose}; give that of a run of these clients")
        return cls.of(times, lines)

    @classmethod
    def of(cls, times: Mapping[str, ClientTimes], lines: Sequence[TimelineEvent]) -> Self:
        """The times that were written down of a run."""
        told = {(line.client, line.asked): line for line in lines if line.event not in (OPENED, STARTED)}
        return cls(times, told=told, opened={line.round: line for line in lines if line.event == OPENED})

    @property
    def is_real(self) -> bool:
        return bool(self.opened)

    def opens(self, number: int) -> float:
        if (line := self.opened.get(number)) is not None:
            self.now = line.seconds
            self.events.append(line)
        return self.now

    def ends_of(self, request: Request) -> float:
        told = self.told.get((request.client, request.round))
        return math.inf if told is None else told.seconds

    def next(self, limit: float = math.inf) -> Job | None:
        coming = super().next(limit)
        if coming is not None and done_at(coming) == math.inf:
            raise ExchangeError("run.pace.replay has no further replies: the run that it is of went no further")
        return coming

    def carried(self, exchange: Exchange) -> Exchange:
        """Who did not answer that step does not, for the same reason; the others are asked."""

        def answered(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
            told = {one.client: self.told[one.client, one.round] for one in requests}
            lost = {one.client: told[one.client].error for one in requests if told[one.client].step == one.step}
            answers = exchange([one for one in requests if lost.get(one.client) is None], deadline)
            for one in requests:
                error = lost.get(one.client)
                yield next(answers) if error is None else Answer(one.client, error=error)

        return answered
