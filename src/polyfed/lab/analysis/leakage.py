"""Leakage of a run: membership inference on the replies of its last round and on its final models.

Sources: Yeom et al. (CSF 2018), a threshold on the loss; Carlini et al. (IEEE S&P 2022), "Membership inference attacks
from first principles", for scores and rates.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, RunError
from polyfed.core.randomness import generator, isolated
from polyfed.data.samples import Samples, union
from polyfed.engines.local import LocalEngine
from polyfed.federation.cohort import Cohort, Sums
from polyfed.federation.filters import Ask, Reply
from polyfed.federation.membership import Member
from polyfed.federation.population import Population
from polyfed.federation.state import flatten, unflatten
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult, ModelName
from polyfed.models.model import Model, ModelSettings
from polyfed.privacy.settings import UPDATE
from polyfed.reporting.run_tables import table_json
from polyfed.reporting.tables import TextTable
from polyfed.runs.events import Callbacks
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER
from polyfed.runs.session import Session
from polyfed.tasks import evaluating
from polyfed.tasks.classification import Classification
from polyfed.tasks.retrieval import PairTask
from polyfed.tasks.task import Task
from polyfed.wire.ledger import Ledger
from polyfed.wire.payload import Payload, TensorBundle, Weights

LEVEL = 0.95
FALSE_POSITIVES = 0.01
_DRAWS = 1000
_FEWEST = 10  # candidates on each side, below which no interval is informative
_BATCH = 256


@dataclass(frozen=True)
class TrainedModel:
    """A trained model of a run.

    Attributes:
        name: ``server``, a type of clients, or a client.
        round: Round of its weights.
        settings: Its architecture.
        task: The task of its training.
        head: Name of the task's head.
        classes: Target -> names of its classes.
        model: The model itself, on the device, in evaluation mode.
    """

    name: str
    round: int
    settings: ModelSettings
    task: Task
    head: str
    classes: Mapping[str, tuple[str, ...]]
    model: Model


@dataclass(frozen=True)
class Simulated:
    """A run with simulated clients and all their data.

    Attributes:
        run: The opened run.
        which: ``last`` or ``best`` server model, or the number of a round.

    Raises:
        ConfigError: Its clients are at other sites, or the device is missing.
    """

    run: Run
    which: str = "last"

    def __post_init__(self) -> None:
        if not self.experiment.clients:
            own = self.run.folder
            raise ConfigError(f"the clients of '{own}' are at other sites, with their data; give a simulated run")
        _ = self.run.place

    @property
    def experiment(self) -> Experiment:
        return self.run.experiment

    @property
    def federation(self) -> Population:
        return self.run.federation

    # ---- models

    def globals(self) -> Iterator[TrainedModel]:
        """The server's model, and global models of types that differ from it."""
        server = self._server() if self.experiment.server is not None else None
        if server is not None:
            yield server
        for client_type, weights in self.run.global_weights.items():
            # a server that is the average of a type is not evaluated twice
            if server is None or not _holds(weights, server.model.exchanged()):
                yield self._global(client_type)

    @property
    def is_server_untrained(self) -> bool:
        """True if the server's model still has its initial weights, as the method does not train it."""
        if self.experiment.server is None:
            return False
        return _holds(self._server().model.exchanged(), self.federation.server_model().exchanged())

    def _server(self) -> TrainedModel:
        server = self.run.server_model(self.which)
        server.warn_if_untrained()
        head = str(server.config.get("head", ""))
        return TrainedModel(SERVER, server.round, server.settings, server.task, head, server.classes, server.model)

    def _global(self, client_type: str, name: str | None = None) -> TrainedModel:
        number = self.run.checkpoint.round
        if self.which.isdecimal() and int(self.which) != number:
            raise ConfigError(f"model {self.which}: the global model of '{client_type}' is of round {number} alone")
        member = self.federation.members[self.run.types[client_type].clients[0].id]
        return self._of_member(name or client_type, number, member, self.run.global_model(client_type))

    def _of_member(self, name: str, number: int, member: Member, model: Model) -> TrainedModel:
        classes = self.federation.train(member).classes
        return TrainedModel(name, number, member.model, member.settings.task, member.head, classes, model)

    # ---- clients

    def judges(self, trained: TrainedModel) -> dict[str, Member]:
        """Clients that can evaluate the model: with its task, modalities and classes, and test samples."""
        suited = {}
        for name, member in self.federation.members.items():
            like = member.settings.task == trained.task and set(member.model.encoders) == set(trained.settings.encoders)
            if like and member.settings.test_split is not None:
                test = self.test(trained, member)
                targets = trained.task.class_targets
                if len(test) > 0 and all(test.classes.get(name) == trained.classes.get(name) for name in targets):
                    suited[name] = member
        return suited

    def train(self, trained: TrainedModel, member: Member) -> Samples:
        # None: the client's own views, which are open already
        return self.federation.train(member, None if member.model == trained.settings else trained.settings)

    def test(self, trained: TrainedModel, member: Member) -> Samples:
        samples = self.federation.test(member, None if member.model == trained.settings else trained.settings)
        assert samples is not None
        return samples


def _holds(weights: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> bool:
    """True if all tensors of ``part`` are in ``weights`` with equal values."""
    return all(
        name in weights and weights[name].shape == value.shape and torch.equal(weights[name].cpu(), value.cpu())
        for name, value in part.items()
    )


Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Discrimination:
    """How well scores separate members from others; chance has an AUC of 0.5 and a rate of 0.01.

    Each score is of a separate item: intervals treat them as independent.

    Attributes:
        auc: Area under the curve of true over false positives.
        rate: Share of members above the threshold that 1 % of the others exceed.
        members, others: Their numbers.
    """

    auc: Interval
    rate: Interval
    members: int
    others: int

    @classmethod
    def of(cls, members: Scores, others: Scores, seed: int) -> Discrimination:
        auc = Interval(area(members, others), *bootstrapped(members, others, seed))
        rate = Interval(int((members > threshold(others)).sum()) / len(members), *_rates(members, others, seed))
        return cls(auc, rate, len(members), len(others))

    def to_json(self) -> dict[str, Any]:
        intervals = {"auc": dict(vars(self.auc)), "tpr_at_1_percent": dict(vars(self.rate))}
        return {**intervals, "members": self.members, "others": self.others}


def area(members: Scores, others: Scores) -> float:
    ordered = np.sort(others)
    wins = sum(ordered.searchsorted(members, side).sum() for side in ("left", "right")) / 2  # ties win half
    return float(wins / (len(members) * len(others)))


def threshold(others: Scores) -> float:
    """The lowest score that at most 1 % of the others exceed."""
    return float(np.sort(others)[len(others) - 1 - math.floor(FALSE_POSITIVES * len(others))])


def bootstrapped(members: Scores, others: Scores, seed: int) -> tuple[float, float]:
    draws = np.random.default_rng(seed)
    areas = [area(draws.choice(members, len(members)), draws.choice(others, len(others))) for _ in range(_DRAWS)]
    low, high = np.quantile(areas, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _rates(members: Scores, others: Scores, seed: int) -> tuple[float, float]:
    """Percentiles of the rate, with the uncertainty of the threshold.

    Of n others Binomial(n, 1 %) are above the true threshold, which lies between two neighbours: the low end uses
    the higher of them, the high end the lower, each with Jeffreys' posterior of the rate. Plain resampling covers
    79 % at 100 items, as the threshold is among the highest of the others.
    """
    draws, count = np.random.default_rng(seed), len(members)
    ordered = np.concatenate([[np.inf], np.sort(others)[::-1], [-np.inf]])
    above = np.append(count - np.searchsorted(np.sort(members), ordered[:-1], side="right"), count)
    positions = draws.binomial(len(others), FALSE_POSITIVES, _DRAWS)
    ends = []
    for detected, level in ((above[positions], (1 - LEVEL) / 2), (above[positions + 1], (1 + LEVEL) / 2)):
        rates = draws.beta(detected + 0.5, count - detected + 0.5)
        rates[detected == (0 if level < 0.5 else count)] = 0 if level < 0.5 else 1  # no rate is beyond
        ends.append(float(np.quantile(rates, level)))
    return ends[0], ends[1]


def leak_verdict(auc: Interval, *, is_protected: bool) -> str:
    """Verdict on an area; an attack that fails without any protection measures nothing."""
    if auc.low > 0.5:
        return "much" if auc.value >= 0.75 else "some" if auc.value >= 0.6 else "little"
    return "nothing found" if is_protected else "attack too weak"


class Leakage(Analysis):
    """Attack the replies of the last round and the models: which samples were trained on? Simulated runs only."""

    is_reported: ClassVar[bool] = True

    clients: int = Field(default=3, ge=1, description="clients attacked at most, of each architecture in turn")
    samples: int = Field(default=200, ge=10, description="members at most, and as many others")
    seed: int = Field(default=0, ge=0, description="seed of all draws of the attacks")
    model: ModelName = "last"

    def answer(self, run: Run) -> AnalysisResult:
        return run_leakage(Simulated(run, self.model), self)


# ---- candidates for membership


@dataclass(frozen=True)
class Candidates:
    """Members and others, n together.

    Attributes:
        samples: Samples of both.
        is_member: True for samples that were trained on.
    """

    samples: Samples
    is_member: Bool[Tensor, " n"]


def first_of_each(items: Int64[Tensor, " n"]) -> Int64[Tensor, " k"]:
    """The position of the first sample of each item, in order: samples of one item are members together."""
    firsts: dict[int, int] = {}
    for position, item in enumerate(items.tolist()):
        firsts.setdefault(item, position)
    return torch.tensor(list(firsts.values()), dtype=torch.int64)


def candidates_of(
    members: list[Member], train: Callable[[Member], Samples], test: Callable[[Member], Samples | None], plan: Leakage
) -> Candidates | str:
    """One sample per item, trained on by some clients or not; or the reason why there are none.

    A classification has as many members as others of each class: else the attacker would recognise a client's classes
    instead of its samples.

    Args:
        members: The clients.
        train, test: Functions that return the samples of a client.
        plan: Settings of the analysis.
    """
    held, tests = [train(member) for member in members], [test(member) for member in members]
    # the clients of a group may share their test samples
    if not (distinct := {id(samples): samples for samples in tests if samples is not None and len(samples)}):
        return "no test samples, so none that was not trained on"
    name, sides = ",".join(member.id for member in members), []
    for part in (union(held), union(list(distinct.values()))):
        order = torch.randperm(len(part), generator=generator(plan.seed, "candidates", name, len(part)))
        sides.append(part.subset(order[first_of_each(part.items[order])]))
    inside, outside = _balanced(sides[0], sides[1], members[0].settings.task)
    if (size := min(len(inside), len(outside), plan.samples)) < _FEWEST:
        return f"{size} training and test items of the same classes, an attack needs {_FEWEST} of each"
    both = union([inside.subset(torch.arange(size)), outside.subset(torch.arange(size))])
    return Candidates(both, torch.arange(2 * size) < size)


def _balanced(inside: Samples, outside: Samples, task: Task) -> tuple[Samples, Samples]:
    """Equal numbers of each class, in an order in which every prefix is mixed."""
    if not isinstance(task, Classification):
        return inside, outside
    positions: list[Int64[Tensor, " k"]] = []
    labels = [part.targets[task.target].long() for part in (inside, outside)]
    classes = torch.unique(torch.cat(labels)).tolist()
    by_class = [[(own == name).nonzero().flatten() for own in labels] for name in classes]
    sizes = [min(len(a), len(b)) for a, b in by_class]
    for side in range(2):
        chosen = [pair[side][:size] for pair, size in zip(by_class, sizes, strict=True)]
        # the k-th of each class, then the next: both sides stop at the same classes
        positions.append(torch.cat(chosen)[torch.cat([torch.arange(len(own)) for own in chosen]).argsort(stable=True)])
    return inside.subset(positions[0]), outside.subset(positions[1])


# ---- scores of samples


def has_scores(task: Task) -> bool:
    return isinstance(task, Classification | PairTask) or task.is_per_sample


def sample_scores(model: Model, task: Task, head: nn.Module | None, samples: Samples) -> Float[Tensor, " n"]:
    """Fit of a model to each sample; higher fits better.

    Classification: log p / (1 - p) of the true class p, which orders samples as the loss does (Carlini et al. 2022,
    Eq. 5). Pairs: the similarity of a sample's two representations, less the mean of those with the other samples'
    both ways. Other tasks: minus the loss of the sample alone.
    """
    with evaluating(model, head):
        if isinstance(task, PairTask):
            sides, samples = [], task.usable(samples)
            for modality in task.between:
                inputs = [part.batch(torch.arange(len(part))).inputs[modality] for part in _parts(samples)]
                sides.append(torch.cat([model.represent(modality, x.to(model.device)) for x in inputs]).double())
            return pair_margin(sides[0] @ sides[1].T).cpu()
        if isinstance(task, Classification):
            scores = []
            for part in _parts(samples):
                batch = task.usable(part.batch(torch.arange(len(part)))).to(model.device)
                scores.append(confidence(task.scores(model, head, batch).double(), batch.targets[task.target].long()))
            return torch.cat(scores).cpu()
        losses = [
            task.loss(model, head, samples.batch(torch.tensor([position])).to(model.device))
            for position in range(len(samples))
        ]
        return -torch.stack(losses).double().cpu()


def confidence(logits: Float[Tensor, "n c"], labels: Tensor) -> Float[Tensor, " n"]:
    """log p / (1 - p) of the true class: its logit less the logarithmic sum of the others'."""
    true = logits.gather(1, labels[:, None])[:, 0]
    return true - logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)


def pair_margin(similarities: Float[Tensor, "n n"]) -> Float[Tensor, " n"]:
    own, n = similarities.diagonal(), len(similarities)
    return own - (similarities.sum(0) + similarities.sum(1) - 2 * own) / (2 * (n - 1))


def _parts(samples: Samples) -> list[Samples]:
    return [samples.subset(index) for index in torch.split(torch.arange(len(samples)), _BATCH)]


# ---- attacks


@dataclass(frozen=True)
class Finding:
    """Result of an attack.

    Attributes:
        on: Target of the attack.
        verdict: Verdict, or the reason for no attack.
        figures: Figures of the attack; None if there was none.
    """

    on: str
    verdict: str
    figures: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        if self.figures is None:
            return {"on": self.on, "attack": "membership", "reason": self.verdict}
        return {"on": self.on, "attack": "loss threshold", **self.figures, "verdict": self.verdict}


@dataclass(frozen=True)
class MembershipAttack:
    """Membership inference on a simulated run by a threshold on the loss.

    Attributes:
        opened: The run.
        seen: Its last round as the server saw it.
        plan: Settings of the analysis.
    """

    opened: Simulated
    seen: SeenRound
    plan: Leakage

    def findings(self) -> Iterator[Finding]:
        """Findings on the replies of the attacked clients, on all sums, and on the final models."""
        by_type: dict[str, dict[str, None]] = defaultdict(dict)
        for reply in self.seen.replies:
            by_type[self.member(reply.clients[0]).model.architecture][reply.clients[0]] = None
        turns = [name for name in chain(*zip_longest(*by_type.values())) if name is not None][: self.plan.clients]
        for reply in self.seen.replies:
            if reply.is_sum or reply.clients[0] in turns:
                for name, bundle in reply.content.bundles.items():
                    yield self._on_reply(reply, name, bundle)
        for trained in self.opened.globals():
            yield self._on_final(trained)

    def member(self, client: str) -> Member:
        return self.opened.federation.members[client]

    def fresh(self, member: Member) -> Model:
        """A client's model with its initial weights, which the server can compute from the run's seed."""
        return self.opened.federation.client_model(member).to(self.opened.run.place)

    def candidates(self, clients: Sequence[str]) -> Candidates | str:
        federation = self.opened.federation
        return candidates_of([self.member(name) for name in clients], federation.train, federation.test, self.plan)

    def _on_reply(self, seen: SeenReply, name: str, bundle: TensorBundle) -> Finding:
        on, member = f"{bundle_name(name, bundle)} of {seen.sender}", self.member(seen.clients[0])
        if reason := self._obstacle(member, name, bundle):
            return Finding(on, reason)
        candidates = self.candidates(seen.clients)
        if isinstance(candidates, str):
            return Finding(on, candidates)
        model = self.fresh(member)
        model.load(bundle)
        return self._finding(on, member.settings.task, model, member.head, candidates)

    def _obstacle(self, member: Member, name: str, bundle: TensorBundle) -> str:
        """Why a bundle cannot be attacked by scores of samples; empty if it can."""
        task = member.settings.task
        if not has_scores(task):
            return f"no score of a single sample is known for the task '{task.component_name()}'"
        if not isinstance(bundle, Weights):
            return f"no attack on {bundle_name(name, bundle)} is known to us"
        if name != UPDATE:
            return "these are not weights of a model"
        missing = sorted(self.fresh(member).exchanged().keys() - bundle.keys())
        return f"'{missing[0]}' does not cross, so the model is incomplete" if missing else ""

    def _on_final(self, trained: TrainedModel) -> Finding:
        opened, on = self.opened, f"final model of {trained.name}"
        members = list(opened.judges(trained).values())
        if trained.name == SERVER and opened.is_server_untrained:
            return Finding(on, "the method does not train it")
        if not members or not has_scores(trained.task):
            return Finding(on, "no client has its task, modalities and classes, and test samples")
        train, test = partial(opened.train, trained), partial(opened.test, trained)
        candidates = candidates_of(members, train, test, self.plan)
        if isinstance(candidates, str):
            return Finding(on, candidates)
        return self._finding(on, members[0].settings.task, trained.model, trained.head, candidates)

    def _finding(self, on: str, task: Task, model: Model, head: str, candidates: Candidates) -> Finding:
        scores = sample_scores(model, task, model.heads[head] if head in model.heads else None, candidates.samples)
        inside, values = candidates.is_member, scores.double().cpu()
        result = Discrimination.of(values[inside].numpy(), values[~inside].numpy(), self.plan.seed)
        experiment = self.opened.experiment
        is_protected = experiment.policy.privacy is not None or experiment.aggregation.secure is not None
        return Finding(on, leak_verdict(result.auc, is_protected=is_protected), result.to_json())


def bundle_name(name: str, bundle: TensorBundle) -> str:
    """Name of a field of a reply: logits are scores on the wire, and not all named tensors are weights of a model."""
    if isinstance(bundle, Weights) and name != UPDATE:
        return name
    return "logits" if bundle.label == "scores" else bundle.label


_INTERVAL = "{value:.2f} [{low:.2f}, {high:.2f}]"
_NOTE = (
    "AUC: chance is 0.5. Detected at 1 %: share of members detected when at most 1 % of the others are taken for "
    "members. In brackets: 95 % intervals (bootstrap; exact)."
)


def run_leakage(opened: Simulated, plan: Leakage) -> AnalysisResult:
    """Attack the replies of the last round of a simulated run, and its models.

    Raises:
        ConfigError: No client has sent a reply.
        RunError: The run's state before its last round is lost.
    """
    with cpu_threads(opened.experiment.run.threads), seen_round(opened) as seen:
        findings = list(MembershipAttack(opened, seen, plan).findings())
    method, protection = opened.experiment.algorithm.component_name(), protection_of(opened.experiment)
    exact = "bit-identical" if seen.is_exact else "equal up to rounding, as this machine computes other bits"
    about = (
        f"Method: {method}. Protection: {protection}. Replies of round {seen.number}, requested again: {exact}. An "
        "attack that finds nothing proves nothing: others may be better. One that is too weak without protection "
        "measures nothing."
    )
    rows = [
        {
            "attacked": one.on,
            "AUC": _INTERVAL.format(**one.figures["auc"]),
            "detected at 1 %": _INTERVAL.format(**one.figures["tpr_at_1_percent"]),
            "members": str(one.figures["members"]),
            "others": str(one.figures["others"]),
            "leaked": one.verdict,
        }
        for one in findings
        if one.figures
    ]
    reasons = [{"attacked": one.on, "because": one.verdict} for one in findings if not one.figures]
    shown = [
        TextTable.of(f"{opened.run.name} leaked: was this sample trained on", rows, [_NOTE, about]),
        TextTable.of(f"{opened.run.name}: no attack here", reasons, [] if rows else [about]),
    ]
    tables = [table for table in shown if table.rows]
    content = {
        "run": opened.run.name,
        "round": seen.number,
        "method": method,
        "protection": protection,
        "exact": seen.is_exact,
        "plan": {name: value for name, value in dict(plan).items() if name != "model"},
        "findings": [one.to_json() for one in findings if one.figures],
        "no_attack": [one.to_json() for one in findings if not one.figures],
        "tables": [table_json(table) for table in tables],
    }
    return AnalysisResult(content, tables)


def protection_of(experiment: Experiment) -> str:
    """Protection of replies, in words."""
    privacy, parts = experiment.policy.privacy, list[str]()
    if privacy is not None and privacy.reply is not None:
        parts.append(f"noise on replies (multiplier {privacy.reply.noise_multiplier:.3g})")
    if privacy is not None and privacy.samples is not None:
        parts.append(f"DP-SGD (multiplier {privacy.samples.noise_multiplier:.3g})")
    if experiment.aggregation.secure is not None:
        parts.append("secure aggregation")
    return " and ".join(parts) or "none"


# ---- replies of the last round, requested again; noise included, as a repeated request repeats its answer

_LEFT_BEHIND = ("models", "plots", "analysis", "arrays", "report.*", "*.png")


@dataclass(frozen=True)
class SeenReply:
    """The server's view of one reply.

    Attributes:
        clients: The client that sent it, or all clients of a type whose sum it is.
        step: Name of the step.
        content: The reply as sent, or the mean of a type.
    """

    clients: tuple[str, ...]
    step: str
    content: Payload

    @property
    def is_sum(self) -> bool:
        return len(self.clients) > 1

    @property
    def sender(self) -> str:
        name = f"sum of {len(self.clients)} clients" if self.is_sum else self.clients[0]
        return f"{name} ({self.step})"


@dataclass(frozen=True)
class SeenRound:
    """The last round of a run as its server saw it.

    Attributes:
        number: Number of the round.
        replies: Replies with tensors, in the order of requests.
        is_exact: True if the server ends with the run's own bits.
    """

    number: int
    replies: tuple[SeenReply, ...]
    is_exact: bool


@dataclass
class _WatchedCohort(Cohort):
    """A cohort that records its replies."""

    seen: list[SeenReply] = field(default_factory=list)

    def replies(self, ask: Ask, phase: int) -> Iterator[Reply]:
        for reply in super().replies(ask, phase):
            self._record((reply.sender.id,), ask, self.channel.transport.decode(reply.payload))
            yield reply

    def summed(self, sums: Sums, ask: Ask, phase: int) -> Iterator[Reply]:
        seen = set[str]()
        for reply in super().summed(sums, ask, phase):
            client_type = reply.sender.architecture
            if client_type not in seen:  # each client of the type has the same mean
                seen.add(client_type)
                clients = tuple(info.id for info in self.clients if info.architecture == client_type)
                self._record(clients, ask, reply.payload)
            yield reply

    def _record(self, clients: tuple[str, ...], ask: Ask, content: Payload) -> None:
        if any(len(bundle) for bundle in content.bundles.values()):
            self.seen.append(SeenReply(clients, ask.step, content))


@contextlib.contextmanager
def seen_round(opened: Simulated) -> Iterator[SeenRound]:
    """The last complete round of a run, run again in a copy of its folder that exists as long as the block.

    Raises:
        ConfigError: No round with clients is complete.
        RunError: The state before the last round is lost.
    """
    last, folder = opened.run.checkpoint, opened.run.folder
    if not last.round or not opened.experiment.algorithm.asks_clients:
        raise ConfigError(f"no client of '{folder}' has sent anything yet; finish a round (polyfed resume)")
    with tempfile.TemporaryDirectory(prefix="polyfed-leakage-") as name:
        copy = Path(name) / "run"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*_LEFT_BEHIND))
        files = RunFolder.existing(copy)
        run = opened.experiment.run.model_copy(update={"device": str(opened.run.place)})
        session = Session(opened.experiment.model_copy(update={"run": run}), files, files.identity)
        session.events = Callbacks([session.recorder])  # without listeners
        session.federation = opened.federation
        session.attach(LocalEngine(session.hosting.here()))
        server = session.server
        before, problems = files.newest_checkpoint(lambda one: "" if one.round < last.round else "the last round")
        if before is None or before.round != last.round - 1:
            lost = f"run '{folder}' has lost its state before round {last.round}"
            raise RunError(f"{lost} ({'; '.join(problems)}); run it again")
        server.restore(before.round, unflatten(before.tensors))
        session.cohorts.restore(before.facts, before.tensors)
        cohort = session.cohort(last.round, Ledger())
        server.begin(last.round)
        watched = _WatchedCohort(**{item.name: getattr(cohort, item.name) for item in fields(Cohort) if item.init})
        with isolated(session.experiment.run.seed, last.round, SERVER):
            session.experiment.algorithm.round(server, watched)
        ended = flatten(server.snapshot())
        is_exact = ended.keys() == last.tensors.keys() and _holds(ended, last.tensors)
        yield SeenRound(last.round, tuple(watched.seen), is_exact)
