"""What the server saw of the clients in the last round of a simulated run: that round is asked once more.

The replies are those of the run, noise of differential privacy included: a repeated request repeats its answer.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.randomness import isolated
from polyfed.engines.local import LocalEngine
from polyfed.federation.cohort import Cohort, Sums
from polyfed.federation.filters import Ask, Reply
from polyfed.federation.state import flatten, unflatten
from polyfed.lab.analysis.simulated import Simulated
from polyfed.runs.events import Callbacks
from polyfed.runs.folder import RunFolder
from polyfed.runs.records import SERVER
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.payload import Payload, TensorBundle

_LEFT_BEHIND = ("models", "plots", "analysis", "arrays", "report.*", "*.png")


@dataclass(frozen=True)
class SeenReply:
    """What the server saw after one request.

    Attributes:
        clients: who made it: one client, or all of a type whose sum it is.
        step: that was asked for.
        content: the reply as it left, or the mean of a type.
    """

    clients: tuple[str, ...]
    step: str
    content: Payload

    @property
    def is_sum(self) -> bool:
        return len(self.clients) > 1

    @property
    def bundles(self) -> Mapping[str, TensorBundle]:
        return self.content.bundles

    @property
    def who(self) -> str:
        name = f"sum of {len(self.clients)} clients" if self.is_sum else self.clients[0]
        return f"{name} ({self.step})"


@dataclass(frozen=True)
class SeenRound:
    """The last round of a run as its server saw it.

    Attributes:
        number: of the round.
        replies: in the order of requests; only those with tensors.
        is_exact: whether the server ends in the run's own bits.
    """

    number: int
    replies: tuple[SeenReply, ...]
    is_exact: bool


@dataclass
class _WatchedCohort(Cohort):
    """A cohort that notes what comes back."""

    seen: list[SeenReply] = field(default_factory=list)

    def replies(self, ask: Ask, phase: int) -> Iterator[Reply]:
        for reply in super().replies(ask, phase):
            self._note((reply.sender.id,), ask, self.channel.transport.decode(reply.payload))
            yield reply

    def summed(self, sums: Sums, ask: Ask, phase: int) -> Iterator[Reply]:
        seen = set[str]()
        for reply in super().summed(sums, ask, phase):
            kind = reply.sender.architecture
            if kind not in seen:  # each of the type gets the same mean
                seen.add(kind)
                clients = tuple(info.id for info in self.clients if info.architecture == kind)
                self._note(clients, ask, reply.payload)
            yield reply

    def _note(self, clients: tuple[str, ...], ask: Ask, content: Payload) -> None:
        if any(len(bundle) for bundle in content.bundles.values()):
            self.seen.append(SeenReply(clients, ask.step, content))


@contextlib.contextmanager
def seen_round(opened: Simulated) -> Iterator[SeenRound]:
    """The last complete round of a run, asked again in a copy of its folder that lasts as long as the block.

    Raises:
        ConfigError: no round with clients is complete.
        RunError: what was there before the last round is lost.
    """
    last = opened.run.checkpoint
    if not last.round or not opened.experiment.algorithm.asks_clients:
        raise ConfigError(f"no client of '{opened.run.folder}' has sent anything yet; finish a round (polyfed resume)")
    with tempfile.TemporaryDirectory(prefix="polyfed-leakage-") as name:
        copy = Path(name) / "run"
        shutil.copytree(opened.run.folder, copy, ignore=shutil.ignore_patterns(*_LEFT_BEHIND))
        session = _attached(opened, RunFolder.existing(copy))
        _restore_before(session, last.round, opened.run.folder)
        replies = _asked(session, last.round)
        yield SeenRound(last.round, replies, _is_equal(flatten(session.server.snapshot()), last.tensors))


def _restore_before(session: Session, number: int, folder: Path) -> None:
    """Be as before a round; raises RunError if nobody knows any more."""
    before, problems = session.folder.newest_checkpoint(
        lambda checkpoint: "" if checkpoint.round < number else "the last round"
    )
    if before is None or before.round != number - 1:
        raise RunError(f"run '{folder}' has lost its state before round {number} ({'; '.join(problems)}); run it again")
    session.server.restore(before.round, unflatten(before.tensors))
    session.cohorts.restore(before.facts, before.tensors)


def _is_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether tensors of the same names have the same bits."""
    return first.keys() == second.keys() and all(
        torch.equal(value.cpu(), second[key].cpu()) for key, value in first.items()
    )


def _attached(opened: Simulated, folder: RunFolder) -> Session:
    """A session over the copy with its clients in this process, which tells nobody of what it does."""
    run = opened.experiment.run.model_copy(update={"device": str(opened.run.place)})
    session = Session(opened.experiment.model_copy(update={"run": run}), folder, folder.identity)
    session.events = Callbacks([session.recorder])
    session.federation = opened.federation
    session.attach(LocalEngine(session.hosting.here()))
    return session


def _asked(session: Session, number: int) -> tuple[SeenReply, ...]:
    server, cohort = session.server, session.cohort(number, Ledger())
    server.begin(number)
    watched = _WatchedCohort(**{item.name: getattr(cohort, item.name) for item in fields(Cohort) if item.init})
    with isolated(session.experiment.run.seed, number, SERVER):
        session.experiment.algorithm.round(server, watched)
    return tuple(watched.seen)
