"""What the server saw of the clients in the last round of a simulated run: that round is asked once more.

The replies are those of the run, noise of differential privacy included: a repeated request repeats its answer.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from polyfed.algorithms.algorithm import Reply
from polyfed.core.errors import ConfigError, PayloadError, RunError
from polyfed.core.randomness import isolated
from polyfed.data.samples import Samples
from polyfed.engines.attacking import AttackingSite
from polyfed.engines.local import LocalEngine
from polyfed.engines.site import Site
from polyfed.federation.cohort import Cohort
from polyfed.federation.membership import Member
from polyfed.federation.state import flatten, unflatten
from polyfed.lab.analysis.simulated import Simulated
from polyfed.privacy.guard import PRIVATE, PrivacyGuard
from polyfed.privacy.settings import UPDATE
from polyfed.runs.events import Callbacks
from polyfed.runs.folder import RunFolder
from polyfed.runs.records import SERVER
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, TensorBundle, Weights

_LEFT_BEHIND = ("models", "plots", "analysis", "arrays", "report.*", "*.png")


@dataclass(frozen=True)
class SeenReply:
    """What the server saw after one request.

    Attributes:
        clients: who made it: one client, or all of a type whose sum it is.
        request: that a client got; of a sum, its first client.
        received: content of the request.
        content: the reply as it left, or the mean of a type.
        is_one_of_several: whether the same clients also answered another step of the round.
    """

    clients: tuple[str, ...]
    request: Request
    received: Payload
    content: Payload
    is_one_of_several: bool = False

    @property
    def is_sum(self) -> bool:
        return len(self.clients) > 1

    @property
    def bundles(self) -> Mapping[str, TensorBundle]:
        return self.content.bundles

    @property
    def who(self) -> str:
        """The client, or the sum of so many; with the step where they answered several."""
        name = f"sum of {len(self.clients)} clients" if self.is_sum else self.clients[0]
        return f"{name} ({self.request.step})" if self.is_one_of_several else name


@dataclass(frozen=True)
class SeenRound:
    """The last round of a run as its server saw it.

    Attributes:
        number: of the round.
        replies: in the order of requests; only those with tensors.
        is_exact: whether the server ends in the run's own bits.
        site: where the clients live, with what they kept before that round.
    """

    number: int
    replies: tuple[SeenReply, ...]
    is_exact: bool
    site: Site


@dataclass
class StagedSite(AttackingSite):
    """A place where some clients have other training samples than their own.

    Attributes:
        samples: client -> what it trains on.
    """

    samples: Mapping[str, Samples] = field(default_factory=dict)

    @classmethod
    def of(cls, site: Site, samples: Mapping[str, Samples], guard: PrivacyGuard | None) -> Self:
        """The same place with other samples, and what protects replies."""
        place = (site.federation, site.spec, site.store, site.device, site.evaluation_batch, site.limits)
        return cls(*place, guard=guard, samples=samples)

    def data_of(self, member: Member) -> Any:
        data = super().data_of(member)
        return replace(data, train=self.samples[member.id]) if member.id in self.samples else data


@dataclass
class _Watched(Cohort):
    """A cohort that notes what comes back."""

    seen: list[SeenReply] = field(default_factory=list)

    def ask(self, step: Callable[..., Reply], **more: Any) -> Iterator[Reply]:
        summed = self.secure is not None and step.__name__ in self.secure.weights
        channel, sent = self.channel, dict[str, Request]()

        def exchange(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
            own = {request.client: request for request in requests if request.step == step.__name__}
            sent.update(own)
            for answer in channel.exchange(requests, deadline):
                if answer.client in own and not summed:
                    self._note(own[answer.client], answer)
                yield answer

        self.channel = replace(channel, exchange=exchange)
        try:
            for reply in super().ask(step, **more):
                if summed:
                    self._note_sum(sent, reply)
                yield reply
        finally:
            self.channel = channel

    def _note(self, request: Request, answer: Answer) -> None:
        received = self._read(request)
        with contextlib.suppress(PayloadError):  # what the server cannot read it does not see
            if answer.payload is not None:
                content = self.channel.transport.decode(answer.payload, received, self.channel.limits)
                self.seen.append(SeenReply((request.client,), request, received, content))

    def _note_sum(self, sent: Mapping[str, Request], reply: Reply) -> None:
        kind = reply.sender.architecture
        clients = tuple(info.id for info in self.clients if info.architecture == kind and info.id in sent)
        if any(clients == earlier.clients and earlier.request.step == sent[clients[0]].step for earlier in self.seen):
            return  # each of the type gets the same mean
        request = sent[clients[0]]
        self.seen.append(SeenReply(clients, request, self._read(request), reply.payload))

    def _read(self, request: Request) -> Payload:
        return self.channel.transport.decode(request.payload, None, self.channel.limits)


@contextlib.contextmanager
def seen_round(opened: Simulated, samples: Mapping[str, Samples] | None = None) -> Iterator[SeenRound]:
    """The last complete round of a run, asked again in a copy of its folder that lasts as long as the block.

    Args:
        opened: the run.
        samples: client -> what it trains on in place of its own samples; as many.

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
        if samples:
            for pattern in ("*.jsonl", "*.head"):  # other samples make another reply, which nobody gets
                for ledger in (copy / PRIVATE).glob(pattern):
                    ledger.unlink()
        session, site = _attached(opened, RunFolder.existing(copy), samples or {})
        _restore_before(session, last.round, opened.run.folder)
        replies = _asked(session, last.round)
        yield SeenRound(last.round, replies, _is_equal(flatten(session.server.snapshot()), last.tensors), site)


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
    return first.keys() == second.keys() and all(
        torch.equal(value.cpu(), second[key].cpu()) for key, value in first.items()
    )


def _attached(opened: Simulated, folder: RunFolder, samples: Mapping[str, Samples]) -> tuple[Session, Site]:
    """A session over the copy with its clients in this process, which tells nobody of what it does."""
    run = opened.experiment.run.model_copy(update={"device": str(opened.run.place)})
    session = Session(opened.experiment.model_copy(update={"run": run}), folder, folder.identity)
    session.events = Callbacks([session.recorder])
    session.federation = opened.federation
    own = session.hosting.here()
    site = StagedSite.of(own, samples, own.guard) if samples else own
    session.attach(LocalEngine(site))
    return session, site


def _asked(session: Session, number: int) -> tuple[SeenReply, ...]:
    server, cohort = session.server, session.cohort(number, Ledger())
    server.begin(number)
    watched = _Watched(**{item.name: getattr(cohort, item.name) for item in fields(Cohort) if item.init})
    with isolated(session.experiment.run.seed, number, SERVER):
        session.experiment.algorithm.round(server, watched)
    replies = [reply for reply in watched.seen if any(len(bundle) for bundle in reply.bundles.values())]
    times = Counter(reply.clients for reply in replies)
    return tuple(replace(reply, is_one_of_several=times[reply.clients] > 1) for reply in replies)


def shown_kind(name: str, bundle: TensorBundle) -> str:
    """What a field of a reply is called: logits are scores on the wire, and not all named tensors are a model's."""
    if isinstance(bundle, Weights) and name != UPDATE:
        return name
    return "logits" if bundle.kind == "scores" else bundle.kind
