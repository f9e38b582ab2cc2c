"""Recalls with what they depend on, found among the metrics that ``polyfed.tasks.retrieval`` reports."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NAME = re.compile(r"(?P<source>.+)_to_(?P<target>.+)_r@(?P<cutoff>\d+)(?P<protocol>|_full|_\d+fold|_batch\d+)")
_GALLERY = re.compile(r"(?P<task>|.+_)gallery_.+")
# counts and gallery sizes come with the metrics of a task and are told apart by name alone
_CONTEXT = re.compile(
    r"(.+_)?gallery_.+|(.+_)?folds(_.+)?|.+_positives_per_query(_.+)?|.+_of_constant|n|items|samples|classes"
)
_CONSTANT = "_of_constant"


@dataclass(frozen=True)
class Recall:
    """One recall: percent of the queries with a positive among the first ``cutoff`` of the gallery.

    Attributes:
        name: name of the metric.
        direction: such as ``image to text``.
        cutoff: K of R@K.
        protocol: empty, or ``full`` or ``5fold`` where a run reports several.
        value: percent.
        gallery: entries that a query is compared with (mean over folds).
        positives: positives a query (mean).
        folds: number of folds that the value is a mean of.
        task: what names of metrics begin with where there are several tasks.
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
        """Such as ``image to text R@5 (5fold)``."""
        return f"{self.direction} R@{self.cutoff}{f' ({self.protocol})' if self.protocol else ''}"

    @property
    def chance(self) -> float:
        return chance_recall(self.gallery, self.positives, self.cutoff)

    @property
    def times_chance(self) -> float:
        """How often the value contains chance; 1 is no better than a random order."""
        return self.value / self.chance if self.chance else math.nan


def chance_recall(gallery: float, positives: float, cutoff: int) -> float:
    """Percent of queries with a positive among the first ``cutoff`` of a gallery in random order.

    Drawn without replacement: 1 - prod_{i < k} (g - p - i) / (g - i); that is k p / g for k = 1 or p = 1, and
    less otherwise. NaN where gallery or positives are not known.
    """
    if math.isnan(gallery) or math.isnan(positives):
        return math.nan
    # fewer negatives than places: one of the first must be a positive, and the product below would be negative
    if cutoff > gallery - positives:
        return 100.0
    return 100.0 * (1.0 - math.prod((gallery - positives - i) / (gallery - i) for i in range(cutoff)))


def chance_of(metric: str, metrics: Mapping[str, float]) -> float:
    """What guessing reaches, in percent; NaN where that is not known.

    For a recall and the sum of the recalls at 1 a random order of the gallery; for all else the best constant
    prediction on the same test items, as the task reports it.
    """
    if f"{metric}{_CONSTANT}" in metrics:
        return metrics[f"{metric}{_CONSTANT}"]
    recalls = find_recalls(metrics)
    if metric.endswith("r1_sum"):
        return _chance_of_firsts(recalls, metric.removesuffix("r1_sum"))
    return next((recall.chance for recall in recalls if recall.name == metric), math.nan)


def scale_of(metric: str, metrics: Mapping[str, float]) -> float:
    """The most that a metric in percent can be: 100, or of a sum of recalls at 1 as many times 100 as it sums."""
    if not metric.endswith("r1_sum"):
        return 100.0
    task = metric.removesuffix("r1_sum")
    return 100.0 * (sum(recall.cutoff == 1 and recall.task == task for recall in find_recalls(metrics)) or 1)


def _chance_of_firsts(recalls: Iterable[Recall], task: str) -> float:
    firsts = [recall.chance for recall in recalls if recall.cutoff == 1 and recall.task == task]
    return sum(firsts) if firsts else math.nan


def find_recalls(metrics: Mapping[str, float]) -> list[Recall]:
    """All recalls among ``metrics``, in their order; gallery and positives are NaN where not given."""
    recalls = []
    tasks = {found["task"] for found in map(_GALLERY.fullmatch, metrics) if found}
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


def is_context(name: str) -> bool:
    """Whether a metric says what others depend on (a gallery's size, a count), not how good a model is."""
    return _CONTEXT.fullmatch(name) is not None
