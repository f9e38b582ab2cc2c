"""Metrics in context: recalls with their chance, main metrics, and spreads over clients."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from polyfed.reporting.statistics import finite_mean, finite_values, spread_of
from polyfed.runs.records import SERVER, RunRecords

_NAME = re.compile(r"(?P<source>.+)_to_(?P<target>.+)_r@(?P<cutoff>\d+)(?P<protocol>|_full|_\d+fold|_batch\d+)")
_GALLERY = re.compile(r"(?P<task>|.+_)gallery_.+")
# counts and gallery sizes are among the metrics of a task and differ by name alone
_CONTEXT = re.compile(
    r"(.+_)?gallery_.+|(.+_)?folds(_.+)?|.+_positives_per_query(_.+)?|.+_of_constant|n|items|samples|classes"
)
_CONSTANT = "_of_constant"

EVALUATIONS = ("test", "validation")
"""Splits of evaluations."""
PREFERRED = ("r1_sum", "accuracy", "dice")
"""Main metrics, in order of preference."""
_EVERYBODY = "all clients"


@dataclass(frozen=True)
class Recall:
    """One recall: percent of the queries with a positive among the first ``cutoff`` of the gallery.

    Attributes:
        name: Name of the metric.
        direction: Direction, ``image to text``.
        cutoff: K of R@K.
        protocol: Empty, or ``full`` or ``5fold`` where a run reports several.
        value: Percent.
        gallery: Entries that a query is compared with (mean over folds).
        positives: Positives per query (mean).
        folds: Number of folds that the value is a mean of.
        task: Prefix of the names of metrics where there are several tasks.
    """

    name: str
    direction: str
    cutoff: int
    protocol: str
    value: float
    gallery: float
    positives: float
    folds: float
    task: str = ""

    @property
    def label(self) -> str:
        """``image to text R@5 (5fold)``."""
        return f"{self.direction} R@{self.cutoff}{f' ({self.protocol})' if self.protocol else ''}"

    @property
    def chance(self) -> float:
        return chance_recall(self.gallery, self.positives, self.cutoff)

    @property
    def times_chance(self) -> float:
        """Value over chance; 1 equals a random order."""
        return self.value / self.chance if self.chance else math.nan


def chance_recall(gallery: float, positives: float, cutoff: int) -> float:
    """Percent of queries with a positive among the first ``cutoff`` of a gallery in random order.

    Drawn without replacement: 1 - prod_{i < k} (g - p - i) / (g - i); that is k p / g for k = 1 or p = 1, and
    less otherwise. NaN where gallery or positives are not known.
    """
    if math.isnan(gallery) or math.isnan(positives):
        return math.nan
    # with fewer negatives than ranks one of the first is a positive, and the product below would be negative
    if cutoff > gallery - positives:
        return 100.0
    return 100.0 * (1.0 - math.prod((gallery - positives - i) / (gallery - i) for i in range(cutoff)))


def chance_of(metric: str, metrics: Mapping[str, float]) -> float:
    """Value of guessing, in percent; NaN if it is unknown.

    For a recall and the sum of the recalls at 1 a random order of the gallery; for other metrics the best constant
    prediction on the same test items, as the task reports it.
    """
    if f"{metric}{_CONSTANT}" in metrics:
        return metrics[f"{metric}{_CONSTANT}"]
    if metric.endswith("r1_sum"):
        firsts = _summed(metric, metrics)
        return sum(recall.chance for recall in firsts) if firsts else math.nan
    return next((recall.chance for recall in find_recalls(metrics) if recall.name == metric), math.nan)


def scale_of(metric: str, metrics: Mapping[str, float]) -> float:
    """Maximum of a metric in percent: 100, or for a sum of recalls at 1 as many times 100 as it sums."""
    return 100.0 * (len(_summed(metric, metrics)) or 1)


def _summed(metric: str, metrics: Mapping[str, float]) -> list[Recall]:
    """Recalls at 1 in a metric called ``r1_sum``; empty for other metrics."""
    task = metric.removesuffix("r1_sum")
    firsts = (recall for recall in find_recalls(metrics) if recall.cutoff == 1 and recall.task == task)
    return list(firsts) if metric.endswith("r1_sum") else []


def find_recalls(metrics: Mapping[str, float]) -> list[Recall]:
    """All recalls among ``metrics``, in their order; gallery and positives are NaN where not given."""
    recalls = []
    tasks = {match["task"] for match in map(_GALLERY.fullmatch, metrics) if match}
    for name, match in ((name, _NAME.fullmatch(name)) for name in metrics):
        if match is None:
            continue
        source, target, suffix = match["source"], match["target"], match["protocol"]
        task = max((task for task in tasks if source.startswith(task)), key=len, default="")
        source = source.removeprefix(task)
        recalls.append(
            Recall(
                name=name,
                direction=f"{source} to {target}",
                cutoff=int(match["cutoff"]),
                protocol=suffix.removeprefix("_"),
                value=metrics[name],
                gallery=metrics.get(f"{task}gallery_{target}{suffix}", math.nan),
                positives=metrics.get(f"{task}{source}_to_{target}_positives_per_query{suffix}", math.nan),
                folds=metrics.get(f"{task}folds{suffix}", math.nan),
                task=task,
            )
        )
    return recalls


def recalls_and_others(metrics: Mapping[str, float]) -> tuple[list[Recall], list[str]]:
    """All recalls, and the names of the other metrics of quality."""
    recalls = find_recalls(metrics)
    names = {recall.name for recall in recalls}
    return recalls, [name for name in metrics if not is_context(name) and name not in names]


def is_context(name: str) -> bool:
    """True for a condition of other metrics (a gallery's size, a count) rather than a metric of quality."""
    return _CONTEXT.fullmatch(name) is not None


def common_chance(metric: str, measured: Sequence[Mapping[str, float]]) -> float:
    """Value of guessing, mean over the measured participants; NaN unless it is known for all."""
    return finite_mean(chance_of(metric, metrics) for metrics in measured) if measured else math.nan


def teaching(metrics: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Metrics recorded for both the clients' ensemble and the server: name, and both values."""
    for name, server in metrics.items():
        ensemble = metrics.get(name.replace("student.", "teacher.", 1))
        if name.startswith("student.") and ensemble is not None:
            yield name.partition(".")[2], ensemble, server


# ---- metrics of comparison


@dataclass(frozen=True)
class ClientSpread:
    """One metric over the clients of a group that have a finite value of it; figures are NaN if none has.

    Attributes:
        group: Group of the clients.
        metric: Name of the metric.
        values: Client -> its finite value, in client order.
        clients: Number of clients in the group.
    """

    group: str
    metric: str
    values: Mapping[str, float]
    clients: int

    @property
    def mean(self) -> float:
        return finite_mean(self.values.values()) if self.values else math.nan

    @property
    def worst_client(self) -> str:
        """The client with the worst value, the first of several; empty without values."""
        worst_of = max if lower_is_better(self.metric) else min
        return worst_of(self.values, key=self.values.__getitem__, default="")

    @property
    def worst(self) -> float:
        return self.values.get(self.worst_client, math.nan)

    @property
    def best(self) -> float:
        best_of = min if lower_is_better(self.metric) else max
        return best_of(self.values.values(), default=math.nan)

    @property
    def disparity(self) -> float:
        """Highest minus lowest value, 0 for one client."""
        return abs(self.best - self.worst)

    @property
    def std(self) -> float:
        return spread_of(self.values.values(), sample=False)

    def to_json(self) -> dict[str, Any]:
        names = ("mean", "worst", "worst_client", "best", "disparity", "std")
        return {"clients": len(self.values)} | {name: getattr(self, name) for name in names}


def lower_is_better(metric: str) -> bool:
    """True for a loss, whose highest value is the worst."""
    return "loss" in metric.split("_")


def spread_over(records: RunRecords) -> dict[str, tuple[str, ...]]:
    """Groups over which metrics are summarised; all clients too where every client is a group, as sites are."""
    groups = records.groups
    # sites of a deployment: a spread over one client each would be empty
    alone = len(groups) > 1 and all(len(members) == 1 for members in groups.values())
    return groups | ({_EVERYBODY: records.clients} if alone and _EVERYBODY not in groups else {})


def client_spread(records: RunRecords, group: str, metric: str, split: str = "test") -> ClientSpread:
    members = spread_over(records)[group]
    last = {client: records.last(client, split).get(metric, math.nan) for client in members}
    return ClientSpread(group, metric, finite_values(last), len(members))


def client_spreads(records: RunRecords, split: str = "test") -> Iterator[ClientSpread]:
    for group, members in spread_over(records).items():
        for metric in quality_names([records.last(client, split) for client in members]):
            yield client_spread(records, group, metric, split)


def quality_names(measured: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in dict.fromkeys(chain(*measured)) if not is_context(name)]


def spreads_json(records: RunRecords) -> dict[str, Any]:
    """Split -> group -> metric -> its spread, for the splits that clients were measured on."""
    spreads: dict[str, Any] = {}
    for split in EVALUATIONS:
        for spread in client_spreads(records, split):
            spreads.setdefault(split, {}).setdefault(spread.group, {})[spread.metric] = spread.to_json()
    return spreads


def main_metric(records: RunRecords, participants: Collection[str], split: str = "test") -> str:
    """The main metric of some participants, of the server the one that selected its model; empty without metrics."""
    names = dict.fromkeys(name for participant in participants for name in records.metric_names(participant, split))
    # dictionaries instead of sets keep the order of the run, so that equal records give equal pages
    quality = [name for name in names if not is_context(name) and name != "loss"]
    preferred = (records.chosen.metric, *PREFERRED) if SERVER in participants else PREFERRED
    return next((name for name in preferred if name in names), quality[0] if quality else "")


def judged_by(
    records: RunRecords, metric: str | None = None, split: str = "test"
) -> tuple[str, dict[str, ClientSpread]]:
    """Main metric of the server, empty without metrics, and spread of each group of clients; of ``metric`` if given."""
    groups = {
        group: client_spread(records, group, metric or main_metric(records, clients, split), split)
        for group, clients in records.groups.items()
    }
    return metric or main_metric(records, [SERVER], split), groups
