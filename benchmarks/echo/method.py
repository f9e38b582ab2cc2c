"""The echo as a method of polyfed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from pydantic import Field

from echo import work
from polyfed.algorithms.algorithm import Algorithm, Reply, client_step, each
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.server import Server
from polyfed.wire.payload import Representations


class Echo(Algorithm):
    """Sends representations, has every client add a number to them, and sums the replies."""

    schedule: list[int] = Field(default_factory=lambda: [10_000], description="bytes each way, round by round")
    busy: float = Field(default=0.0, description="CPU seconds that a client computes first")
    idle: float = Field(default=0.0, description="seconds that a client sleeps first")

    def round(self, server: Server, cohort: Cohort) -> None:
        size = self.schedule[server.clock.round - 1]
        bank = Representations({"text": torch.from_numpy(work.bank(size, server.clock.round)).clone()})
        numbers = {client.id: number for number, client in enumerate(server.clients)}
        addend = each(lambda client: work.addend(numbers[client.id]))

        def exchange() -> Iterator[work.Array]:
            for reply in cohort.ask(self.echo, representations=bank, addend=addend):
                yield reply.representations["text"].numpy()

        result = work.measured(size, exchange)
        server.record(seconds=result.seconds, started=result.started, size=float(size), crc=float(result.crc))

    @client_step(representations=Representations)
    def echo(self, client: Client, representations: Representations, addend: float) -> Reply:
        end = time.process_time() + self.busy
        while time.process_time() < end:
            pass
        time.sleep(self.idle)
        return Reply(representations=Representations({name: value + addend for name, value in representations.items()}))
