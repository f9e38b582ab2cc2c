"""Dry runs: check and build everything, train one batch of each kind of participant, and estimate bytes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.activity import preparing
from polyfed.core.device import cpu_threads, resolve_device
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.data.samples import Samples
from polyfed.data.source import Accounts
from polyfed.engines.site import Site
from polyfed.federation.client import Client, ClientInfo, ServerEncoders
from polyfed.federation.participant import Participant
from polyfed.lab.analysis import cost
from polyfed.models.model import Model
from polyfed.reporting.run_tables import account_table
from polyfed.reporting.tables import TextTable, count, mib, span_of
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.records import SERVER
from polyfed.runs.server_side import accounts_of
from polyfed.runs.session import Session
from polyfed.wire.payload import Logits, Representations

_TRIED = 3  # rounds, as clients of some methods begin alone
_ENOUGH = 16  # samples of a batch on a CPU; a GPU's memory must hold all
_DRAWN = 200  # rounds whose cohorts are drawn at most; a mean over more would be the same
_LENGTHS = ("epochs", "steps", "batches_per_epoch")  # ends of names of training lengths
_ROWS = (Representations.label, Logits.label)  # bundles with a row for each public sample

_S = TypeVar("_S", bound=Settings)
Moved = Mapping[str, Mapping[str, float]]
"""Direction -> kind of bundle -> bytes of one client in a round."""


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run.

    Attributes:
        experiment: Its settings.
        clients: All clients of the federation.
        sizes: Client of each kind, or ``server`` -> size of its model.
        moved: Client of each kind -> bytes of a round.
        accounts: Source -> items found, read, and left out.
    """

    experiment: Experiment
    clients: tuple[ClientInfo, ...]
    sizes: Mapping[str, cost.ModelSize]
    moved: Mapping[str, Moved]
    accounts: Accounts

    @classmethod
    def of(cls, experiment: Experiment) -> DryRun:
        """Open the data, build the models, and train in a temporary folder.

        Raises:
            PolyfedError: Settings are inconsistent, or a client fails.
        """
        with tempfile.TemporaryDirectory() as folder, cpu_threads(experiment.run.threads):
            session = Session(cost.without_deadlines(experiment), RunFolder(Path(folder)), "dry")
            session.federation.data.ahead = False
            session.require_sound()
            accounts = accounts_of(experiment, session.federation)
            return cls(experiment, session.federation.infos, *_tried(session), accounts)

    def a_round(self, direction: str) -> dict[str, float]:
        """Kind of bundle -> bytes of all clients in a round, mean over rounds in which clients take part."""
        bundles = dict.fromkeys(bundle for moved in self.moved.values() for bundle in moved[direction])
        return {name: fmean(self._of(cohort, direction, name) for cohort in self._cohorts) for name in bundles}

    def _of(self, cohort: tuple[ClientInfo, ...], direction: str, bundle: str) -> float:
        moved = [self.moved[self._first[_type(client)]][direction].get(bundle, 0.0) for client in cohort]
        # a round waits for the replies of a share of those asked
        return (min(self.experiment.run.pace.most(cohort) / len(cohort), 1.0) if cohort else 0.0) * sum(moved)

    @cached_property
    def _cohorts(self) -> list[tuple[ClientInfo, ...]]:
        run = self.experiment.run
        numbers = range(1, min(run.rounds, _DRAWN) + 1)
        return [run.sampling.draw(self.clients, generator(run.seed, number, "cohort")) for number in numbers]

    @cached_property
    def _first(self) -> dict[tuple[str, str], str]:
        return {_type(client): client.id for client in cost.one_of_each(self.clients)}

    def tables(self) -> list[TextTable]:
        """Participants, bytes of a round and of the run, and protection."""
        rounds, policy = self.experiment.run.rounds, self.experiment.policy
        asked = max(rounds - self.experiment.algorithm.rounds_without_clients, 0)
        crossing = []
        for direction in ("down", "up"):
            bundles = self.a_round(direction)
            for bundle, moved in {**bundles, "all": sum(bundles.values())}.items():
                crossing.append((f"{bundle}, {direction}", mib(moved), mib(asked * moved)))
        notes = ["In MiB, of the first round with clients, without evaluation."]
        protection = [("replies of clients", policy.words()), ("the model from false clients", policy.against_false())]
        participants = ("", "of them", "samples", "parameters", "trained")
        return [
            account_table({source: [count.plain() for count in counts] for source, counts in self.accounts.items()}),
            TextTable("Who takes part", participants, list(self._participants())),
            TextTable("What crosses", ("", "per round", f"{rounds} rounds"), crossing, notes),
            TextTable("What protects it", ("", "by"), protection),
        ]

    def _participants(self) -> Iterator[tuple[str, ...]]:
        for client_type, first in self._first.items():
            samples = [client.samples for client in self.clients if _type(client) == client_type]
            yield (client_type[0], count(len(samples)), span_of(samples), *self._size(first))
        yield (SERVER, "", "", *self._size(SERVER))

    def _size(self, participant: str) -> tuple[str, str]:
        size = self.sizes.get(participant)
        return ("-", "-") if size is None else (count(size.parameters), count(size.trained))


def _type(client: ClientInfo) -> tuple[str, str]:
    return client.group, client.architecture


# ---- a round of few samples


def _tried(session: Session) -> tuple[dict[str, cost.ModelSize], dict[str, Moved]]:
    """Sizes of models, and bytes of one client of each kind in the first round with any bytes."""
    experiment = session.experiment
    algorithm = _short(experiment.algorithm)
    session.experiment = experiment.model_copy(update={"algorithm": algorithm})
    few = _FewPublic.of(session)
    site = _FewSamples(**vars(session.hosting.here()))
    site.spec, site.few = site.spec.model_copy(update={"algorithm": algorithm}), few
    session.attach(cost.StrictEngine(site))
    server = session.server
    algorithm.setup(server)
    few.cut(server)
    first = min(algorithm.rounds_without_clients + 1, experiment.run.rounds)
    for number in range(first, min(first + _TRIED, experiment.run.rounds + 1)):
        preparing(f"a batch of each kind of client, round {number}")
        ledger = cost.one_round(session, number, nullcontext())
        if ledger.records or not algorithm.asks_clients:
            break
    moved = {
        client.id: few.scaled(cost.bytes_by_kind(ledger, client.id)) for client in cost.one_of_each(server.clients)
    }
    return cost.model_sizes(session), moved


def _short(settings: _S) -> _S:
    """The settings with each number of epochs or steps at 1."""
    changed: dict[str, Any] = {}
    for name, value in settings:
        if isinstance(value, Settings):
            changed[name] = _short(value)
        elif isinstance(value, int) and value > 1 and name.endswith(_LENGTHS):
            changed[name] = 1
    return settings.model_copy(update=changed)


@dataclass(frozen=True)
class _FewPublic:
    """A batch of public samples, complete items.

    Attributes:
        index: Positions in the public set.
        share: Share of the samples that are exchanged in a round.
        most: Largest number of samples of a batch.
    """

    index: Int64[Tensor, " k"]
    share: float = 1.0
    most: int = _ENOUGH

    @classmethod
    def of(cls, session: Session) -> _FewPublic:
        public, experiment = session.federation.public_samples({}), session.experiment
        most = _ENOUGH if resolve_device(experiment.run.device).type == "cpu" else sys.maxsize
        if public is None:
            return replace(_NOTHING, most=most)
        exchange = getattr(experiment.algorithm, "public", None)
        wanted = exchange.samples if isinstance(exchange, PublicExchange) else None
        drawn = torch.randperm(len(public), generator=generator(experiment.run.seed, "dry run"))[:wanted].sort().values
        trainings = [group.training for group in experiment.clients.values()]
        trainings += [experiment.server.training] if experiment.server else []
        size = max(training.batch_size for training in trainings)
        items = public.items[drawn]
        few = drawn[items <= items[: min(size, most)][-1]]
        return cls(few, len(few) / len(drawn), most)

    def cut(self, participant: Participant) -> None:
        """Reduce a participant's public set to these, and its other parts by the same share."""
        public = participant.public
        if public.pairs is None:
            return
        parts = {name: _first(part, max(2, round(self.share * len(part)))) for name, part in public.parts.items()}
        participant.public = replace(public, pairs=public.pairs.subset(self.index), parts=parts)

    def scaled(self, moved: Moved) -> Moved:
        """Bytes of an exchange of the complete public set."""
        return {
            direction: {name: size / self.share if name in _ROWS else size for name, size in bundles.items()}
            for direction, bundles in moved.items()
        }


_NOTHING = _FewPublic(torch.arange(0))


@dataclass
class _FewSamples(Site):
    """A site whose clients have one batch of private and one of public samples."""

    few: _FewPublic = _NOTHING

    def build_client(self, *given: Any, **named: Any) -> Client:
        client = super().build_client(*given, **named)
        size = min(client.training.batch_size, self.few.most)
        client.train = _first(client.train, size)
        client.server_encoders = client.server_encoders and _FewGuided(client.server_encoders, size)
        self.few.cut(client)
        return client


@dataclass(frozen=True)
class _FewGuided:
    """The server's encoders at a client with few samples."""

    encoders: ServerEncoders
    size: int

    def model(self, weights: Mapping[str, Tensor]) -> Model:
        return self.encoders.model(weights)

    @property
    def train(self) -> Samples:
        return _first(self.encoders.train, self.size)

    @property
    def test(self) -> Samples | None:
        return self.encoders.test


def _first(samples: Samples, size: int) -> Samples:
    return samples.subset(torch.arange(min(size, len(samples))))
