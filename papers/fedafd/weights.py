"""Aggregation weights of a round: who counted how much for which public samples (FedAFD, supplement, figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from papers.drawing import Matrix, draw_panels
from papers.projections import drawn
from pydantic import Field

from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult
from polyfed.reporting.tables import TextTable, count, format_number
from polyfed.runs.opened import Run

_PREFIX = "weights."


class Weights(Analysis):
    """Draw the weights of clients in the aggregation, by public sample, and compare kinds of clients."""

    round: int | None = Field(default=None, description="which round; by default the last")
    samples: int = Field(default=7, ge=1, description="samples in the drawing, at random")

    def answer(self, run: Run) -> AnalysisResult:
        return weights_result(run.name, channels_of(run, self.round, self.samples))


WeightShare = dict[str, float]
"""Weight of some clients: their number (``clients``), the weight of one of them, mean over the samples (``mean``),
that over an equal weight (``relative``), the weight of all of them (``total``), and the share of the samples on which
one of them weighs most (``leading``)."""


@dataclass(frozen=True)
class ChannelWeights:
    """Weights on one channel (a modality) in one round.

    Attributes:
        channel: its name.
        round: the round.
        clients: ids, one a row.
        kinds: of the clients, ``uni-modal`` or ``multi-modal``, or their group where the configuration has no models.
        values: [clients, samples], columns of sum 1; 0 without a contribution.
        chosen: columns to be drawn one by one.
    """

    channel: str
    round: int
    clients: tuple[str, ...]
    kinds: tuple[str, ...]
    values: NDArray[np.float64]
    chosen: tuple[int, ...]

    @property
    def counted(self) -> NDArray[np.float64]:
        """Columns of samples with a contribution."""
        kept: NDArray[np.float64] = self.values[:, self.values.sum(0) > 0]
        return kept

    @property
    def effective(self) -> float:
        """Effective number of clients 1 / sum_c w_c^2 (Kish 1965), mean over the samples; NaN without samples."""
        squares = np.square(self.counted).sum(0)
        return float((1 / squares).mean()) if squares.size else float("nan")

    def shares(self) -> dict[str, WeightShare]:
        return {kind: self._share(np.equal(self.kinds, kind)) for kind in dict.fromkeys(self.kinds)}

    def by_client(self) -> dict[str, WeightShare]:
        return {client: self._share(np.equal(self.clients, client)) for client in self.clients}

    def _share(self, rows: NDArray[np.bool_]) -> WeightShare:
        values, number = self.counted, int(rows.sum())
        if not values.size:
            return {"clients": number, **dict.fromkeys(("mean", "relative", "total", "leading"), float("nan"))}
        mean, total = float(values[rows].mean()), float(values[rows].sum(0).mean())
        leading = float(rows[values.argmax(0)].mean())
        return {"clients": number, "mean": mean, "relative": mean * len(values), "total": total, "leading": leading}

    def to_json(self) -> dict[str, Any]:
        """Figures, and the chosen columns."""
        return {
            "round": self.round,
            "clients": self.clients,
            "kinds": self.kinds,
            "samples": self.values.shape[1],
            "effective_clients": self.effective,
            "shares": self.shares(),
            "by_client": self.by_client(),
            "chosen": self.chosen,
            "values": self.values[:, self.chosen].tolist(),
        }


def weights_result(run: str, channels: Sequence[ChannelWeights]) -> AnalysisResult:
    """One table per channel: kinds of clients, then each client."""
    tables = []
    for each in channels:
        shares = {f"{kind} ({share['clients']})": share for kind, share in each.shares().items()} | each.by_client()
        digits = {"mean": 4, "relative": 2, "total": 3, "leading": 1}
        rows = []
        for name, share in shares.items():
            in_percent = share | {"leading": 100 * share["leading"]}
            rows.append((name, *(format_number(in_percent[key], number) for key, number in digits.items())))
        note = (
            f"Over {count(each.values.shape[1])} recorded public samples. Effective number of clients: "
            f"{format_number(each.effective)} of {len(each.clients)}."
        )
        columns = ("clients", "mean weight", "times equal", "together", "heaviest on %")
        tables.append(TextTable(f"{run}, round {each.round}: weights of {each.channel}", columns, rows, (note,)))
    content = {"run": run, "channels": {each.channel: each.to_json() for each in channels}}
    picture = partial(draw_panels, f"{run}: aggregation weights", list(map(_matrix, channels)), 1)
    return AnalysisResult(content, tables, picture)


def _matrix(each: ChannelWeights) -> Matrix:
    """Weights of the clients for a few samples."""
    values, columns = each.values[:, each.chosen], [f"sample {position}" for position in each.chosen]
    title = f"{each.channel}, round {each.round}: weight by recorded public sample"
    return Matrix(title, "client", each.clients, columns, values, limits=(0, float(values.max())))


def channels_of(run: Run, number: int | None = None, samples: int = 7) -> list[ChannelWeights]:
    """The weights of all channels.

    Raises:
        RunError: its method records no weights.
        ConfigError: no such round.
    """
    experiment, records = run.experiment, run.records
    arrays = {name: rounds for name, rounds in records.arrays().items() if name.startswith(_PREFIX)}
    if not arrays:
        method = experiment.algorithm.component_name()
        raise RunError(
            f"run '{run.folder}' has no aggregation weights: '{method}' does not weigh outputs of clients for public "
            "samples, or no round is complete; give a run of a method that does, such as creamfl or fedafd"
        )
    recorded = sorted(set(chain.from_iterable(arrays.values())))
    number = recorded[-1] if number is None else number
    if number not in recorded:
        raise ConfigError(f"round {number} of '{run.folder}' lacks weights; {nearest(str(number), map(str, recorded))}")
    kinds, channels = _kinds(run), []
    for name, rounds in arrays.items():
        if number in rounds:  # a modality may have had no clients in the round
            channel, array = name.removeprefix(_PREFIX), rounds[number]
            chosen = tuple(drawn(array.values.shape[1], samples, "weights", channel).tolist())
            of_clients = tuple(kinds.get(client, "clients") for client in array.clients)
            # NaN: the sample has no contribution
            values = np.nan_to_num(array.values, nan=0.0)
            channels.append(ChannelWeights(channel, number, array.clients, of_clients, values, chosen))
    return channels


def _kinds(run: Run) -> dict[str, str]:
    most = {name: max(len(m.encoders) for m in group.models) for name, group in run.experiment.clients.items()}
    kinds = {group: "uni-modal" if number == 1 else "multi-modal" for group, number in most.items()}
    # groups of a deployment are sites, without models in the configuration
    return {client: kinds.get(group, group) for group, clients in run.records.groups.items() for client in clients}
