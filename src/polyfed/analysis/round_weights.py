"""Aggregation weights of a round: who counted how much for which public samples (FedAFD, supplement, figure 3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.analysis.encoders import drawn
from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.runs.arrays import ClientArray
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import RunRecords

SAMPLES = 7
"""As many as in the figure of the paper."""
UNI, MULTI = "uni-modal", "multi-modal"
_PREFIX = "weights."


@dataclass(frozen=True)
class Share:
    """What some clients weigh together.

    Attributes:
        clients: their number.
        mean: weight of one of them, mean over the samples.
        relative: that mean by what it would be with equal weights.
        total: weight of all of them, mean over the samples.
        leading: share of the samples on which one of them weighs most.
    """

    clients: int
    mean: float
    relative: float
    total: float
    leading: float


@dataclass(frozen=True)
class ChannelWeights:
    """Weights on one channel (a modality) in one round.

    Attributes:
        channel: its name.
        round: the round.
        clients: ids, one a row.
        kinds: of the clients, ``uni-modal`` or ``multi-modal``, or their group where the configuration does not say.
        values: [clients, samples], columns of sum 1; 0 where nobody contributed.
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
        """Columns of samples to which somebody contributed."""
        kept: NDArray[np.float64] = self.values[:, self.values.sum(0) > 0]
        return kept

    @property
    def effective(self) -> float:
        """Effective number of clients 1 / sum_c w_c^2 (Kish 1965), mean over the samples; NaN without samples."""
        squares = np.square(self.counted).sum(0)
        return float((1 / squares).mean()) if squares.size else float("nan")

    def shares(self) -> dict[str, Share]:
        """By kind of client."""
        return {kind: self.share([own == kind for own in self.kinds]) for kind in dict.fromkeys(self.kinds)}

    def by_client(self) -> dict[str, Share]:
        """By client."""
        return {client: self.share([other == client for other in self.clients]) for client in self.clients}

    def share(self, members: Sequence[bool]) -> Share:
        """What the clients at the marked rows weigh."""
        rows, values = np.asarray(members), self.counted
        if not values.size:
            nan = float("nan")
            return Share(int(rows.sum()), nan, nan, nan, nan)
        mean = float(values[rows].mean())
        leading = float(rows[values.argmax(0)].mean())
        return Share(int(rows.sum()), mean, mean * len(values), float(values[rows].sum(0).mean()), leading)

    def to_json(self) -> dict[str, Any]:
        """Figures, and the chosen columns."""
        return {
            "round": self.round,
            "clients": list(self.clients),
            "kinds": list(self.kinds),
            "samples": self.values.shape[1],
            "effective_clients": self.effective,
            "shares": {kind: vars(share) for kind, share in self.shares().items()},
            "by_client": {client: vars(share) for client, share in self.by_client().items()},
            "chosen": list(self.chosen),
            "values": self.values[:, self.chosen].tolist(),
        }


@dataclass(frozen=True)
class RunWeights:
    """Weights of a run's round by channel."""

    run: str
    channels: tuple[ChannelWeights, ...]

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {"run": self.run, "channels": {each.channel: each.to_json() for each in self.channels}}


def run_weights(
    run: Run, *, number: int | None = None, samples: int = SAMPLES, at: Sequence[int] | None = None
) -> RunWeights:
    """The weights that a run recorded of a round, in all channels.

    Args:
        run: opened.
        number: round; None: the last that was recorded.
        samples: so many of the recorded samples are chosen at random ...
        at: ... or these, by their position among the recorded ones, from 0.

    Raises:
        RunError: its method records no weights.
        ConfigError: no such round or sample.
    """
    experiment, records = run.experiment, run.records
    found = {name.removeprefix(_PREFIX): rounds for name, rounds in records.arrays().items() if _is_weights(name)}
    if not found:
        method = experiment.algorithm.component_name()
        raise RunError(
            f"run '{run.folder}' has no aggregation weights: '{method}' does not weigh what clients say of public "
            "samples, or no round is complete; give a run of a method that does, such as creamfl or fedafd"
        )
    recorded = sorted({each for rounds in found.values() for each in rounds})
    wanted = recorded[-1] if number is None else number
    if wanted not in recorded:
        raise ConfigError(
            f"round {wanted} of '{run.folder}' has no weights; {nearest(str(wanted), map(str, recorded))}"
        )
    kinds = _kinds(experiment, records)
    channels = [
        _channel(channel, wanted, rounds[wanted], kinds, samples, at)
        for channel, rounds in found.items()
        if wanted in rounds
    ]
    return RunWeights(records.name, tuple(channels))


def _is_weights(name: str) -> bool:
    return name.startswith(_PREFIX)


def _channel(
    channel: str, number: int, array: ClientArray, kinds: Mapping[str, str], samples: int, at: Sequence[int] | None
) -> ChannelWeights:
    there = array.values.shape[1]
    wrong = [place for place in at or () if not 0 <= place < there]
    if wrong:
        raise ConfigError(f"sample {wrong[0]} of '{channel}' was not recorded; valid: 0 to {there - 1}")
    chosen: Iterable[int] = drawn(there, samples, "weights", channel).tolist() if at is None else at
    return ChannelWeights(
        channel=channel,
        round=number,
        clients=array.clients,
        kinds=tuple(kinds.get(client, "clients") for client in array.clients),
        values=torch.from_numpy(array.values).nan_to_num(0.0).numpy(),
        chosen=tuple(chosen),
    )


def _kinds(experiment: Experiment, records: RunRecords) -> dict[str, str]:
    """Kind of each client: by the number of modalities that its group's models encode, or else its group."""
    widest = {name: max(len(model.encoders) for model in group.models) for name, group in experiment.clients.items()}
    return {
        client: group if group not in widest else UNI if widest[group] == 1 else MULTI
        for group, clients in records.groups.items()
        for client in clients
    }
