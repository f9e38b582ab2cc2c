"""What a run would take, before it is begun: who takes part, seconds, memory and bytes, from one measured round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from polyfed.core.activity import preparing
from polyfed.core.randomness import generator
from polyfed.federation.client import ClientInfo
from polyfed.lab.analysis.cost import Cost, RoundCosts, round_costs
from polyfed.reporting.tables import TextTable, count, duration, mib
from polyfed.runs.experiment import Experiment
from polyfed.runs.records import SERVER

BRIEF = 0.5
"""Seconds that a participant's passes of one kind of training are measured for."""

_TRIED = 3  # rounds: some methods let clients begin by themselves
_DRAWN = 200  # rounds whose cohorts are drawn at most; the mean over more is the same


@dataclass(frozen=True)
class Forecast:
    """What a run would take.

    Attributes:
        experiment: its settings.
        measured: a round of one client of each kind, the first in which something crosses.
    """

    experiment: Experiment
    measured: RoundCosts

    @classmethod
    def of(cls, experiment: Experiment, brief: float = BRIEF) -> Forecast:
        """Opens all data, builds all models, and begins one round of one client of each kind in a temporary folder.

        Args:
            experiment: its settings.
            brief: seconds after which a pass of training is cut short.

        Raises:
            PolyfedError: something does not fit, or a client fails.
        """
        first = min(experiment.algorithm.rounds_without_clients + 1, experiment.run.rounds)
        for number in range(first, min(first + _TRIED - 1, experiment.run.rounds) + 1):
            preparing(f"measuring round {number} of one client of each kind")
            measured = round_costs(experiment, number, operations=False, brief=brief)
            moved = any(cost.moved("down") + cost.moved("up") for cost in measured.costs)
            if moved or not experiment.algorithm.asks_clients:
                break
        return cls(experiment, measured)

    @cached_property
    def by_kind(self) -> dict[tuple[str, str], tuple[Cost, list[ClientInfo]]]:
        infos = {client.id: client for client in self.measured.clients}
        costs = {_kind(infos[cost.participant]): cost for cost in self.measured.costs if cost.kind != SERVER}
        return {
            kind: (cost, [client for client in self.measured.clients if _kind(client) == kind])
            for kind, cost in costs.items()
        }

    @cached_property
    def server(self) -> Cost:
        return next(cost for cost in self.measured.costs if cost.kind == SERVER)

    @cached_property
    def cohorts(self) -> list[tuple[ClientInfo, ...]]:
        run = self.experiment.run
        numbers = range(1, min(run.rounds, _DRAWN) + 1)
        return [run.sampling.draw(self.measured.clients, generator(run.seed, number, "cohort")) for number in numbers]

    @property
    def rounds_with_clients(self) -> int:
        return max(self.experiment.run.rounds - self.experiment.algorithm.rounds_without_clients, 0)

    @property
    def seconds(self) -> float:
        """Of a round with clients on one core after the other; passes take as long as samples are many."""
        return self.server.seconds + self._of_clients

    @property
    def total_seconds(self) -> float:
        """Of the rounds of the whole run, in some of which clients may rest."""
        return self.experiment.run.rounds * self.server.seconds + self.rounds_with_clients * self._of_clients

    @cached_property
    def _of_clients(self) -> float:
        return fmean(self._replying(cohort) * sum(map(self._seconds, cohort)) for cohort in self.cohorts)

    def _seconds(self, client: ClientInfo) -> float:
        (cost, _), training = self.by_kind[_kind(client)], self.experiment.algorithm.local_training
        counts_steps = training is not None and training.steps is not None
        return cost.seconds * (client.samples / cost.samples if cost.samples and not counts_steps else 1)

    def moved(self, direction: str) -> float:
        return fmean(
            self._replying(cohort) * sum(self.by_kind[_kind(client)][0].moved(direction) for client in cohort)
            for cohort in self.cohorts
        )

    def _replying(self, cohort: Sequence[ClientInfo]) -> float:
        """The share of those asked whose replies a round waits for."""
        return min(self.experiment.run.pace.most(cohort) / len(cohort), 1.0) if cohort else 0.0

    @property
    def memory(self) -> int | None:
        """Bytes at the peak of the one that needs most; None where the system does not tell."""
        return max((cost.memory for cost in self.measured.costs if cost.memory is not None), default=None)

    def tables(self) -> list[TextTable]:
        """Who takes part, and what a round and the whole run take."""
        rounds, asked, peak = self.experiment.run.rounds, self.rounds_with_clients, self.memory
        down, up = self.moved("down"), self.moved("up")
        rows = [
            ("clients", count(round(fmean(self._replying(one) * len(one) for one in self.cohorts), 1)), ""),
            ("time, one after the other", duration(self.seconds), duration(self.total_seconds)),
            ("MiB down", mib(down), mib(asked * down)),
            ("MiB up", mib(up), mib(asked * up)),
            ("peak MiB", "-" if peak is None else mib(peak), ""),
        ]
        notes = [
            f"From round {self.measured.round} of one client of each kind on {self.measured.device}, just run; "
            f"a pass of training that takes longer than {BRIEF} s is reckoned from its first batches. "
            "Both are without evaluation, time is also without what engines do side by side.",
        ]
        return [
            TextTable(
                "Who takes part",
                ("", "of them", "measured", "samples", "parameters", "trained"),
                list(self._participants()),
            ),
            TextTable("What it takes", ("", "a round", f"{rounds} rounds"), rows, notes),
            TextTable("What protects it", ("", "by"), list(self._protection())),
        ]

    def _protection(self) -> Iterator[tuple[str, str]]:
        policy = self.experiment.policy
        yield "replies of clients", policy.words()
        yield "the model from false clients", policy.against_false()

    def _participants(self) -> Iterator[tuple[str, ...]]:
        for (group, _), (cost, clients) in self.by_kind.items():
            samples = [client.samples for client in clients]
            least, most = count(min(samples)), count(max(samples))
            span = least if least == most else f"{least} to {most}"
            yield (group, count(len(clients)), cost.participant, span, *_size(cost))
        yield (SERVER, "", "", "", *_size(self.server))


def _kind(client: ClientInfo) -> tuple[str, str]:
    return client.group, client.architecture


def _size(cost: Cost) -> tuple[str, str]:
    return ("-", "-") if cost.size is None else (count(cost.size.parameters), count(cost.size.trained))
