"""What a run gave away: membership inference on what crossed and on final models.

Sources: Yeom et al. (CSF 2018), a threshold on the loss; Carlini et al. (IEEE S&P 2022), "Membership inference attacks
from first principles", for scores and rates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.device import cpu_threads
from polyfed.core.randomness import generator
from polyfed.data.samples import Samples, union
from polyfed.federation.membership import Member
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult, ModelName
from polyfed.lab.analysis.leakage_replies import SeenReply, SeenRound, seen_round
from polyfed.lab.analysis.simulated import Simulated, TrainedModel
from polyfed.models.model import Model
from polyfed.privacy.settings import UPDATE
from polyfed.reporting.run_tables import table_json
from polyfed.reporting.tables import TextTable
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER
from polyfed.tasks import evaluating
from polyfed.tasks.classification import Classification
from polyfed.tasks.pairing import PairTask
from polyfed.tasks.task import Task
from polyfed.wire.payload import TensorBundle, Weights

LEVEL = 0.95
FALSE_POSITIVES = 0.01
_DRAWS = 1000

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure, and the interval that holds it with a confidence of 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Discrimination:
    """How well scores tell members from others; chance has an AUC of 0.5 and a rate of 0.01.

    Each score is of an item of its own: intervals take them as independent.

    Attributes:
        auc: area under the curve of true over false positives.
        rate: share of members that are told at 1 % false positives.
        members, others: how many there are.
    """

    auc: Interval
    rate: Interval
    members: int
    others: int

    @classmethod
    def of(cls, members: Scores, others: Scores, seed: int) -> Discrimination:
        auc = Interval(area(members, others), *bootstrapped(members, others, seed))
        told = int((members > threshold(others)).sum())
        rate = Interval(told / len(members), *_rates(members, others, seed))
        return cls(auc, rate, len(members), len(others))

    def to_json(self) -> dict[str, object]:
        intervals = {"auc": dict(vars(self.auc)), "tpr_at_1_percent": dict(vars(self.rate))}
        return {**intervals, "members": self.members, "others": self.others}


def area(members: Scores, others: Scores) -> float:
    ordered = np.sort(others)
    wins = sum(ordered.searchsorted(members, side).sum() for side in ("left", "right")) / 2  # equal ones win half
    return float(wins / (len(members) * len(others)))


def threshold(others: Scores) -> float:
    """The lowest score above which at most 1 % of the others are."""
    allowed = math.floor(FALSE_POSITIVES * len(others))
    return float(np.sort(others)[len(others) - 1 - allowed])


def bootstrapped(members: Scores, others: Scores, seed: int) -> tuple[float, float]:
    draws = np.random.default_rng(seed)
    areas = [area(draws.choice(members, len(members)), draws.choice(others, len(others))) for _ in range(_DRAWS)]
    low, high = np.quantile(areas, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _rates(members: Scores, others: Scores, seed: int) -> tuple[float, float]:
    """Percentiles of the rate, with the threshold as uncertain as it is.

    Of n others Binomial(n, 1 %) are above the true threshold, which lies between two neighbours: the low end goes by
    the higher of them, the high end by the lower, each with Jeffreys' posterior of the rate. Plain resampling covers
    79 % at 100 items, as the threshold is among the highest of the others.
    """
    draws, count = np.random.default_rng(seed), len(members)
    ordered = np.concatenate([[np.inf], np.sort(others)[::-1], [-np.inf]])
    above = np.append(count - np.searchsorted(np.sort(members), ordered[:-1], side="right"), count)
    positions = draws.binomial(len(others), FALSE_POSITIVES, _DRAWS)
    ends = []
    for told, level in ((above[positions], (1 - LEVEL) / 2), (above[positions + 1], (1 + LEVEL) / 2)):
        rates = draws.beta(told + 0.5, count - told + 0.5)
        rates[told == (0 if level < 0.5 else count)] = 0 if level < 0.5 else 1  # no rate is beyond
        ends.append(float(np.quantile(rates, level)))
    return ends[0], ends[1]


def leak_verdict(auc: Interval, *, is_protected: bool) -> str:
    """What an area says; an attack that fails where nothing protects is no measurement."""
    if auc.low > 0.5:
        return "much" if auc.value >= 0.75 else "some" if auc.value >= 0.6 else "little"
    return "nothing found" if is_protected else "attack too weak"


@dataclass(frozen=True)
class Finding:
    """What one attack found on one thing.

    Attributes:
        on: what was attacked.
        attack: by what; ``membership`` where none applies.
        says: the verdict, or why the attack does not apply.
        figures: for file and table; none where it does not apply.
    """

    on: str
    attack: str
    says: str
    figures: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        about = {"on": self.on, "attack": self.attack}
        return {**about, **self.figures, "verdict": self.says} if self.figures else {**about, "reason": self.says}


MEMBERSHIP = "membership"
_FEWEST = 10  # candidates of each kind: below, no interval says anything


class Leakage(Analysis):
    """Attack what clients sent in the last round, and the models: whose samples does it tell? Simulations."""

    is_reported: ClassVar[bool] = True

    clients: int = Field(default=3, ge=1, description="attacked at most, of each architecture in turn")
    samples: int = Field(default=200, ge=10, description="members at most, and as many others")
    seed: int = Field(default=0, ge=0, description="of all that attacks draw")
    model: ModelName = "last"

    def answer(self, run: Run) -> AnalysisResult:
        return run_leakage(Simulated(run, self.model), self)


@dataclass(frozen=True)
class Situation:
    """What an attacker works with: an opened run, its last round as the server saw it, and a plan."""

    opened: Simulated
    seen: SeenRound
    plan: Leakage

    @property
    def is_protected(self) -> bool:
        experiment = self.opened.experiment
        return experiment.policy.privacy is not None or experiment.aggregation.secure is not None

    def attacked(self) -> Iterator[SeenReply]:
        """All replies of the attacked clients, and all sums."""
        by_type: dict[str, dict[str, None]] = defaultdict(dict)
        for reply in self.seen.replies:
            by_type[self.member(reply.clients[0]).model.architecture][reply.clients[0]] = None
        turns = [name for name in chain(*zip_longest(*by_type.values())) if name is not None]
        return (seen for seen in self.seen.replies if seen.is_sum or seen.clients[0] in turns[: self.plan.clients])

    def member(self, client: str) -> Member:
        return self.opened.federation.members[client]

    def fresh(self, member: Member) -> Model:
        """A client's model with its initial weights, which follow from the run's seed: the server knows them."""
        return self.opened.federation.client_model(member).to(self.opened.run.place)

    def candidates(self, clients: Sequence[str]) -> Candidates | str:
        federation, plan = self.opened.federation, self.plan
        members = [self.member(name) for name in clients]
        return candidates_of(members, federation.train, federation.test, plan.samples, plan.seed)

    def obstacle(self, member: Member, name: str, bundle: TensorBundle) -> str:
        """Why what crossed cannot be attacked by scores of samples; empty if it can."""
        task = member.settings.task
        if not has_scores(task):
            return f"no score of a single sample is known for the task '{task.component_name()}'"
        if isinstance(bundle, Weights):
            if name != UPDATE:
                return "these are no weights of a model"
            missing = sorted(self.fresh(member).exchanged().keys() - bundle.keys())
            return f"'{missing[0]}' and so the whole model does not cross" if missing else ""
        return f"no attack on {bundle_name(name, bundle)} is known to us"


def bundle_name(name: str, bundle: TensorBundle) -> str:
    """What a field of a reply is called: logits are scores on the wire, and not all named tensors are a model's."""
    if isinstance(bundle, Weights) and name != UPDATE:
        return name
    return "logits" if bundle.label == "scores" else bundle.label


# ---- samples of whom an attacker asks whether clients trained on them


@dataclass(frozen=True)
class Candidates:
    """Members and others, n together.

    Attributes:
        samples: of both.
        is_member: which were trained on.
    """

    samples: Samples
    is_member: Bool[Tensor, " n"]


def one_an_item(items: Int64[Tensor, " n"]) -> Int64[Tensor, " k"]:
    """The position of the first sample of each item, in their order: samples of one item are members together."""
    firsts: dict[int, int] = {}
    for position, item in enumerate(items.tolist()):
        firsts.setdefault(item, position)
    return torch.tensor(list(firsts.values()), dtype=torch.int64)


def candidates_of(
    members: Sequence[Member],
    train: Callable[[Member], Samples],
    test: Callable[[Member], Samples | None],
    most: int,
    seed: int,
) -> Candidates | str:
    """Candidates for what the clients made together, or why there are none: one sample an item.

    A classification has as many members as others of each class: else the attacker would tell a client's classes
    instead of its samples.

    Args:
        members: the clients.
        train, test: samples of each.
        most: of each kind.
        seed: of what is drawn.
    """
    held, tests = [train(member) for member in members], [test(member) for member in members]
    # the clients of a group may share their test samples
    distinct = {id(samples): samples for samples in tests if samples is not None and len(samples)}
    if not distinct:
        return "no test samples, so nobody that was not trained on"
    name, sides = ",".join(member.id for member in members), []
    for part in (union(held), union(list(distinct.values()))):
        order = torch.randperm(len(part), generator=generator(seed, "candidates", name, len(part)))
        sides.append(part.subset(order[one_an_item(part.items[order])]))
    inside, outside = _alike(sides[0], sides[1], members[0].settings.task)
    size = min(len(inside), len(outside), most)
    if size < _FEWEST:
        return f"{size} training and test items of like classes, an attack needs {_FEWEST} of each"
    both = union([inside.subset(torch.arange(size)), outside.subset(torch.arange(size))])
    return Candidates(both, torch.arange(2 * size) < size)


def _alike(inside: Samples, outside: Samples, task: Task) -> tuple[Samples, Samples]:
    """Equally many of each class, in an order in which any beginning is mixed."""
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
        turns = torch.cat([torch.arange(len(own)) for own in chosen])
        positions.append(torch.cat(chosen)[turns.argsort(stable=True)])
    return inside.subset(positions[0]), outside.subset(positions[1])


# ---- scores of samples


def has_scores(task: Task) -> bool:
    return isinstance(task, Classification | PairTask) or task.is_per_sample


def sample_scores(model: Model, task: Task, head: nn.Module | None, samples: Samples) -> Float[Tensor, " n"]:
    """How well a model knows each sample; higher is better known.

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
                logits = task.scores(model, head, batch).double()
                scores.append(confidence(logits, batch.targets[task.target].long()))
            return torch.cat(scores).cpu()
        losses = [
            task.loss(model, head, samples.batch(torch.tensor([position])).to(model.device))
            for position in range(len(samples))
        ]
        return -torch.stack(losses).double().cpu()


def confidence(logits: Float[Tensor, "n c"], labels: Tensor) -> Float[Tensor, " n"]:
    """log p / (1 - p) of the true class, from class scores: its score less the logarithmic sum of the others'."""
    true = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return true - others.logsumexp(1)


def pair_margin(similarities: Float[Tensor, "n n"]) -> Float[Tensor, " n"]:
    own, n = similarities.diagonal(), len(similarities)
    return own - (similarities.sum(0) + similarities.sum(1) - 2 * own) / (2 * (n - 1))


def _parts(samples: Samples) -> list[Samples]:
    return [samples.subset(index) for index in torch.split(torch.arange(len(samples)), 256)]


# ---- membership


def membership_findings(situation: Situation) -> Iterator[Finding]:
    """Membership in what crossed, and in the final models."""
    for seen in situation.attacked():
        for name, bundle in seen.bundles.items():
            yield from _in_bundle(situation, seen, name, bundle)
    for trained in situation.opened.globals():
        yield _on_final(situation, trained)


def _in_bundle(situation: Situation, seen: SeenReply, name: str, bundle: TensorBundle) -> Iterator[Finding]:
    on, member = f"{bundle_name(name, bundle)} of {seen.who}", situation.member(seen.clients[0])
    candidates: Candidates | str = situation.obstacle(member, name, bundle)
    candidates = candidates or situation.candidates(seen.clients)
    if isinstance(candidates, str):
        yield Finding(on, MEMBERSHIP, candidates)
        return
    target = _Target(on, member, candidates, member.head)
    model = situation.fresh(member)
    model.load(bundle)
    yield target.finding(situation, model)


def _on_final(situation: Situation, trained: TrainedModel) -> Finding:
    opened, plan = situation.opened, situation.plan
    on, members = f"final model of {trained.name}", list(opened.judges(trained).values())
    candidates: Candidates | str = "no client has its task, modalities and classes, and test samples"
    if trained.name == SERVER and opened.is_server_untrained:
        candidates = "nothing in the method trains it"
    elif members and has_scores(trained.task):
        train, test = partial(opened.train, trained), partial(opened.test, trained)
        candidates = candidates_of(members, train, test, plan.samples, plan.seed)
    if isinstance(candidates, str):
        return Finding(on, MEMBERSHIP, candidates)
    target = _Target(on, members[0], candidates, trained.head)
    return target.finding(situation, trained.model)


@dataclass(frozen=True)
class _Target:
    """Whose training samples are asked for.

    Attributes:
        on: what is attacked, in words.
        member: whose task and training count; of several clients the first.
        candidates: asked for.
        head: of the task in the model.
    """

    on: str
    member: Member
    candidates: Candidates
    head: str

    def finding(self, situation: Situation, model: Model) -> Finding:
        head = model.heads[self.head] if self.head in model.heads else None
        scores = sample_scores(model, self.member.settings.task, head, self.candidates.samples)
        member, values = self.candidates.is_member, scores.double().cpu()
        told = Discrimination.of(values[member].numpy(), values[~member].numpy(), situation.plan.seed)
        says = leak_verdict(told.auc, is_protected=situation.is_protected)
        return Finding(self.on, "loss threshold", says, told.to_json())


_COLUMNS = {
    "AUC": "{auc[value]:.2f} [{auc[low]:.2f}, {auc[high]:.2f}]",
    "told at 1 %": "{tpr_at_1_percent[value]:.2f} [{tpr_at_1_percent[low]:.2f}, {tpr_at_1_percent[high]:.2f}]",
    "members": "{members}",
    "others": "{others}",
}
_NOTE = (
    "AUC: chance is 0.5. Told at 1 %: share of members that are told when at most 1 % of the others are taken for "
    "members. In brackets: intervals of 95 % (bootstrap; exact)."
)


def run_leakage(opened: Simulated, plan: Leakage) -> AnalysisResult:
    """Attack what clients sent in the last round of a simulated run, and its models.

    Raises:
        ConfigError: nobody has sent anything.
        RunError: the run's state before its last round is lost.
    """
    with cpu_threads(opened.experiment.run.threads), seen_round(opened) as seen:
        every = list(membership_findings(Situation(opened, seen, plan)))
    findings = [one for one in every if one.figures]
    unattacked = [one for one in every if not one.figures]
    method, protection = opened.experiment.algorithm.component_name(), protection_of(opened.experiment)
    exact = "to the bit" if seen.is_exact else "but for rounding: this machine computes other bits than the run's"
    about = (
        f"Method: {method}. Protection: {protection}. Replies of round {seen.number}, asked again, {exact}. An attack "
        "that finds nothing proves nothing: others may be better. One that is too weak where nothing protects is no "
        "measurement."
    )
    tables = _tables(opened.run.name, findings, unattacked)
    tables[:1] = [replace(table, notes=(*table.notes, about)) for table in tables[:1]]
    content = {
        "run": opened.run.name,
        "round": seen.number,
        "method": method,
        "protection": protection,
        # whether the replies are those of the run to the bit
        "exact": seen.is_exact,
        "plan": {name: value for name, value in dict(plan).items() if name != "model"},
        "findings": [one.to_json() for one in findings],
        "no_attack": [one.to_json() for one in unattacked],
        "tables": [table_json(table) for table in tables],
    }
    return AnalysisResult(content, tables)


def _tables(run: str, findings: Sequence[Finding], unattacked: Sequence[Finding]) -> list[TextTable]:
    """What attacks found, and what was not attacked."""
    tables = []
    if findings:
        rows = [
            (one.on, one.attack, *(shown.format(**one.figures) for shown in _COLUMNS.values()), one.says)
            for one in findings
        ]
        columns = ("attacked", "by", *_COLUMNS, "gave away")
        tables.append(TextTable(f"{run} gave away: was this sample trained on", columns, rows, (_NOTE,)))
    if unattacked:
        reasons = [(one.on, one.says) for one in unattacked]
        tables.append(TextTable(f"{run}: no attack here", ("what", "because"), reasons))
    return tables


def protection_of(experiment: Experiment) -> str:
    """What protects replies, in words."""
    privacy, parts = experiment.policy.privacy, list[str]()
    if privacy is not None and privacy.reply is not None:
        parts.append(f"noise on replies (multiplier {privacy.reply.noise_multiplier:.3g})")
    if privacy is not None and privacy.samples is not None:
        parts.append(f"DP-SGD (multiplier {privacy.samples.noise_multiplier:.3g})")
    if experiment.aggregation.secure is not None:
        parts.append("secure aggregation")
    return " and ".join(parts) or "none"
