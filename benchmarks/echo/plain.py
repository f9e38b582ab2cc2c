"""The echo without polyfed over actors of Ray.

python -m echo.plain OUT SCHEDULE CLIENTS WORKERS
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from echo import work


class Actor:
    """Clients of one process."""

    def echo(self, values: work.Array, addend: float) -> work.Array:
        return values + addend


def echo(schedule: Sequence[int], clients: int, workers: int) -> list[work.Round]:
    """The bank is put once, replies are taken one by one."""
    import logging

    import ray

    ray.init(address="local", num_cpus=workers, include_dashboard=False, logging_level=logging.ERROR)
    try:
        remote = ray.remote(num_cpus=1)(Actor)
        actors: list[Any] = [remote.remote() for _ in range(workers)]
        rounds = []
        for number, size in enumerate(schedule, 1):
            bank = work.bank(size, number)

            def exchange(bank: work.Array = bank) -> Iterator[work.Array]:
                place = ray.put(bank)
                sent = [actors[k % workers].echo.remote(place, work.addend(k)) for k in range(clients)]
                while sent:
                    yield ray.get(sent.pop(0))

            rounds.append(work.measured(size, exchange))
        return rounds
    finally:
        ray.shutdown()


def main(out: str, schedule: str, clients: str, workers: str) -> None:
    """Measure it."""
    sizes = [int(size) for size in schedule.split(",")]
    work.write_rounds(Path(out), echo(sizes, int(clients), int(workers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
