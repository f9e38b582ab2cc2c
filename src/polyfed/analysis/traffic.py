"""What crossed between server and clients, by method: bytes a client, a direction, a kind and a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from polyfed.core.errors import RunError
from polyfed.runs.opened import Run
from polyfed.runs.records import RunRecords, Transfer

DIRECTIONS = ("down", "up")
EVALUATION = "evaluation"
_BESIDE = ("evaluate:", "setup:")  # steps outside the method's rounds, as the ledger names them


@dataclass(frozen=True)
class Traffic:
    """Bytes of a run. What evaluation of the clients and preparation moved counts apart: another method, or another
    ``run.evaluate_clients``, would move less of it.

    Attributes:
        run: its name.
        method: its algorithm.
        rounds: complete rounds with transfers.
        by_round: direction -> round -> bytes of the method.
        by_kind: kind of bundle -> direction -> bytes of the method.
        by_client: client -> direction -> bytes of the method.
        takings: client -> rounds in which it took part.
        beside: bytes of evaluation and preparation.
    """

    run: str
    method: str
    rounds: int
    by_round: Mapping[str, Mapping[int, int]]
    by_kind: Mapping[str, Mapping[str, int]]
    by_client: Mapping[str, Mapping[str, int]]
    takings: Mapping[str, int]
    beside: int

    @classmethod
    def of(cls, records: RunRecords) -> Traffic:
        """From the ledger.

        Raises:
            RunError: nothing crossed yet.
        """
        method = [transfer for transfer in records.transfers if not transfer.step.startswith(_BESIDE)]
        if not method:
            raise RunError(f"nothing has crossed in '{records.folder}' yet; finish the run with polyfed resume")
        rounds = sorted({transfer.round for transfer in method})
        by_round = _totals(method, lambda transfer: str(transfer.round))
        taken = {(transfer.client, transfer.round) for transfer in method}
        return cls(
            run=records.name,
            method=str(dict(records.config.get("algorithm") or {}).get("name", "")),
            rounds=len(rounds),
            by_round={way: {number: by_round[str(number)][way] for number in rounds} for way in DIRECTIONS},
            by_kind=_totals(method, lambda transfer: transfer.kind or "(none)"),
            by_client=_totals(method, lambda transfer: transfer.client),
            takings=Counter(client for client, _ in taken),
            beside=records.total_bytes() - sum(transfer.bytes for transfer in method),
        )

    @property
    def label(self) -> str:
        """For titles: run and method."""
        return f"{self.run} ({self.method})" if self.method not in ("", self.run) else self.run

    def total(self, direction: str) -> int:
        """Bytes of the method in a direction."""
        return sum(self.by_round[direction].values())

    def a_round(self, direction: str) -> float:
        """Bytes of one client in one round in which it took part, mean."""
        return self.total(direction) / sum(self.takings.values())

    def kind_a_round(self, kind: str, direction: str) -> float:
        """Of these, bytes of one kind of bundle."""
        return self.by_kind[kind][direction] / sum(self.takings.values())

    def cumulative(self) -> dict[int, int]:
        """Round -> bytes of the method so far, both directions."""
        rounds = self.by_round[DIRECTIONS[0]]
        sums = accumulate(sum(self.by_round[way][number] for way in DIRECTIONS) for number in rounds)
        return dict(zip(rounds, sums, strict=True))

    def to_json(self) -> dict[str, Any]:
        """All figures, in bytes."""
        return {
            "run": self.run,
            "method": self.method,
            "rounds": self.rounds,
            "total": {way: self.total(way) for way in DIRECTIONS},
            "a_client_and_round": {way: self.a_round(way) for way in DIRECTIONS},
            "by_kind": {kind: dict(counts) for kind, counts in self.by_kind.items()},
            "by_client": {
                client: dict(counts) | {"rounds": self.takings[client]} for client, counts in self.by_client.items()
            },
            "by_round": {way: dict(self.by_round[way]) for way in DIRECTIONS},
            "cumulative": self.cumulative(),
            EVALUATION: self.beside,
        }


def run_traffic(run: Run) -> Traffic:
    """Of a run.

    Raises:
        RunError: nothing crossed yet.
    """
    return Traffic.of(run.records)


def _totals(transfers: Sequence[Transfer], key: Callable[[Transfer], str]) -> dict[str, Counter[str]]:
    """Of each key the bytes by direction, those with most bytes first; a direction without any has 0."""
    found: dict[str, Counter[str]] = {}
    for transfer in transfers:
        counts = found.setdefault(key(transfer), Counter(dict.fromkeys(DIRECTIONS, 0)))
        counts[transfer.direction] += transfer.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1].total()))
