"""What runs are judged by: the main metric, the selected round, and how far the clients of a group are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from polyfed.reporting.recalls import is_context
from polyfed.reporting.statistics import finite_mean, finite_values, spread_of
from polyfed.runs.records import SERVER, RunRecords

PREFERRED = ("r1_sum", "accuracy", "dice")
_EVERYBODY = "all clients"


@dataclass(frozen=True)
class ClientSpread:
    """One metric over the clients of a group that have a finite value of it; figures are NaN if none has.

    Attributes:
        group: of the clients.
        metric: name of the metric.
        values: client -> its value, finite ones only, in client order.
        clients: how many the group has.
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
        """The client with the worst value, the first of several; empty if none has one."""
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
    """Whether a metric is a loss, of which the highest value is the worst."""
    return "loss" in metric.split("_")


def spread_over(records: RunRecords) -> dict[str, tuple[str, ...]]:
    """Over whom metrics are summed up: each group; where every client is a group of its own, as sites are, all too."""
    groups = records.groups
    # sites of a deployment: a spread over one client each would say nothing
    alone = len(groups) > 1 and all(len(members) == 1 for members in groups.values())
    return groups | ({_EVERYBODY: records.clients} if alone and _EVERYBODY not in groups else {})


def client_spread(records: RunRecords, group: str, metric: str, kind: str = "test") -> ClientSpread:
    members = spread_over(records)[group]
    last = {client: records.last(client, kind).get(metric, math.nan) for client in members}
    return ClientSpread(group, metric, finite_values(last), len(members))


def client_spreads(records: RunRecords, kind: str = "test") -> Iterator[ClientSpread]:
    for group, members in spread_over(records).items():
        for metric in quality_names([records.last(client, kind) for client in members]):
            yield client_spread(records, group, metric, kind)


def quality_names(measured: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in dict.fromkeys(chain(*measured)) if not is_context(name)]


def spreads_json(records: RunRecords) -> dict[str, Any]:
    """Kind -> group -> metric -> figures, for the kinds that clients were measured in."""
    figures: dict[str, Any] = {}
    for kind in ("test", "validation"):
        for spread in client_spreads(records, kind):
            figures.setdefault(kind, {}).setdefault(spread.group, {})[spread.metric] = spread.to_json()
    return figures


def selected_round(records: RunRecords) -> int | None:
    """The round whose server model validation prefers; None if it was never validated."""
    best = records.best(SERVER, main_metric(records, [SERVER], "validation"), "validation")
    return None if best is None else best[0]


def main_metric(records: RunRecords, participants: Iterable[str], kind: str = "test") -> str:
    """The metric that says most of some participants, empty if they have none."""
    names = dict.fromkeys(name for participant in participants for name in records.metric_names(participant, kind))
    # dictionaries instead of sets keep the order of the run, so that equal records give equal pages
    quality = [name for name in names if not is_context(name) and name != "loss"]
    return next((name for name in PREFERRED if name in names), quality[0] if quality else "")


def judged_by(
    records: RunRecords, metric: str | None = None, kind: str = "test"
) -> tuple[str, dict[str, ClientSpread]]:
    """The server's metric, empty if it has none, and the spread of each group of clients; of ``metric`` if given."""
    groups = {
        group: client_spread(records, group, metric or main_metric(records, clients, kind), kind)
        for group, clients in records.groups.items()
    }
    return metric or main_metric(records, [SERVER], kind), groups
