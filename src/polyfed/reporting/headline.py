"""The one figure that a run is judged by, with its interval and chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polyfed.reporting.recalls import Recall, chance_of, find_recalls, scale_of
from polyfed.reporting.statistics import finite_mean
from polyfed.reporting.tables import count
from polyfed.runs.events import Metrics
from polyfed.runs.records import SERVER, RunRecords

SHARES = ("accuracy", "dice")  # in percent, of items or of pixels
MAIN = (*SHARES, "r1_sum")


@dataclass(frozen=True)
class Headline:
    """The one figure that a run is judged by."""

    participant: str  # ``server`` or ``clients``
    metric: str
    value: float  # after the last evaluation; of clients the mean over those that have it
    chance: float  # what guessing reaches, NaN where that is not known
    meaning: str  # a clause with a place for the value
    # test items, never their captions, that the value is a share of, NaN where that is not known; of a mean over
    # clients as many as would deviate as far
    trials: float = math.nan
    kept: tuple[float, float] | None = None  # interval over test items that the evaluation kept

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % over test items: what was kept, else that of as many independent trials; None on unknown many."""
        from polyfed.tasks.scores import share_interval  # takes torch, which pages of finished runs do without

        is_share = self.trials > 0 and 0 <= self.value <= 100
        return self.kept or (share_interval(self.value, self.trials) if is_share else None)

    @property
    def is_above_chance(self) -> bool:
        """Whether all of the interval is above chance; without one, whether the value is."""
        return (self.interval[0] if self.interval else self.value) > self.chance


def interval_in_words(interval: tuple[float, float] | None) -> list[str]:
    return [] if interval is None else [f"95 % interval {interval[0]:.1f} to {interval[1]:.1f}"]


def headline(records: RunRecords) -> Headline | None:
    """The server's main figure, else the clients'; None if nothing was measured."""
    metrics = records.last(SERVER)
    if recalls := find_recalls(metrics):
        return _recall_headline(records, recalls)
    for metric in (name for name in SHARES if name in metrics):
        meaning = f"The server's {metric} is {{}} %"
        value, kept = metrics[metric], records.interval(SERVER, metric)
        return Headline(SERVER, metric, value, chance_of(metric, metrics), meaning, _items(metrics), kept)
    return clients_headline(records)


def _recall_headline(records: RunRecords, recalls: Sequence[Recall]) -> Headline:
    metrics = records.last(SERVER)
    plain = [recall for recall in recalls if not recall.protocol] or recalls
    # of the first task, and in the second direction: of texts and pictures, a picture for a text
    best = max((recall for recall in reversed(plain) if recall.task == plain[0].task), key=lambda one: one.cutoff)
    source, _, target = best.direction.partition(" to ")
    first = f"the first {best.cutoff} of {count(best.gallery)}"
    meaning = f"The server finds the {target} of a {source} among {first} in {{}} % of cases"
    # an entry of the smaller gallery is an item, such as a picture with its captions
    items = (
        math.nan
        if best.protocol
        else min(metrics.get(f"{best.task}gallery_{side}", math.nan) for side in (source, target))
    )
    kept = records.interval(SERVER, best.name)
    return Headline(SERVER, best.name, best.value, best.chance, meaning, items, kept)


def clients_headline(records: RunRecords) -> Headline | None:
    for metric in MAIN:
        judged = last_measured(records, records.clients, metric)
        if judged:
            several, scale = len(judged) > 1, scale_of(metric, judged[0])
            unit = " %" if scale == 100 else f" of {count(scale)} %"
            whose = f"the {len(judged)} clients that have it" if several else "the one client that has it"
            meaning = f"The {'mean ' if several else ''}{metric} of {whose} is {{}}{unit}"
            trials = _common_trials(records, metric)
            value = finite_mean(metrics[metric] for metrics in judged)
            return Headline("clients", metric, value, common_chance(metric, judged), meaning, trials)
    return None


def last_measured(records: RunRecords, participants: Sequence[str], metric: str) -> list[Metrics]:
    return [last for last in map(records.last, participants) if math.isfinite(last.get(metric, math.nan))]


def _items(metrics: Metrics) -> float:
    return metrics.get("items", metrics.get("n", math.nan))


def _common_trials(records: RunRecords, metric: str) -> float:
    """Items of one client whose share would deviate as far as the mean of the clients' shares does.

    Clients of a source's split that is not dealt out are tested on the same items, which are no further trials.
    """
    tested: dict[str, list[float]] = {}
    for group, clients in records.groups.items():
        settings = records.section("clients").get(group) or {}
        is_shared = settings.get("test_split") is not None and settings.get("test") == "all"
        split = f"{settings.get('source')} {settings.get('test_split')}"
        for client in clients:
            if math.isfinite(records.last(client).get(metric, math.nan)):
                tested.setdefault(split if is_shared else client, []).append(_items(records.last(client)))
    count = sum(map(len, tested.values()))
    return 1 / sum((len(items) / count) ** 2 / max(items) for items in tested.values()) if count else math.nan


def common_chance(metric: str, judged: Sequence[Metrics]) -> float:
    """What guessing reaches, mean over those that were judged; NaN where it is not known of all."""
    return finite_mean(chance_of(metric, metrics) for metrics in judged) if judged else math.nan
