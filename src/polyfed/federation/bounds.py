"""Bounds on what one client can do to an average, in medians of what the clients of its kind do."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Self

from pydantic import Field, model_validator

from polyfed.core.settings import Settings
from polyfed.federation.client import ClientInfo

ENOUGH = 3
"""Clients from which on a median can be trusted: of fewer, one alone could move it."""


class Bounds(Settings):
    """Bounds relative to the median of the clients of one kind, which a minority of them cannot move."""

    update: float | None = Field(
        default=4.0,
        ge=1,
        allow_inf_nan=False,
        description="longest update that counts as it is, in medians of the cohort, times the client's samples over "
        "their median where these are more; longer ones are scaled down; None: any",
    )
    refuse: float | None = Field(
        default=8.0,
        ge=1,
        allow_inf_nan=False,
        description="updates of more such medians are refused, their clients excluded from the round; None: none",
    )
    size: float | None = Field(
        default=2.0,
        ge=1,
        allow_inf_nan=False,
        description="weights whose norm is more medians of the cohort's are refused as well; None: none",
    )
    weight: float | None = Field(
        default=6.0,
        ge=1,
        allow_inf_nan=False,
        description="samples that a client counts for at most in an average, in medians of its peers; None: all",
    )
    waiting: int = Field(
        default=1 << 30, ge=0, description="bytes of replies that wait in memory for a median; more wait in a file"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.update is not None and self.refuse is not None and self.refuse < self.update:
            raise ValueError(f"refuse is {self.refuse:g}, below update ({self.update:g}); set it to that or more")
        return self

    @property
    def bind(self) -> bool:
        return any(bound is not None for bound in (self.update, self.refuse, self.size))


def counted(clients: Sequence[ClientInfo], times: float | None) -> dict[str, int]:
    """Client -> samples that it counts for in averages: as many as it joined with, at most ``times`` its median."""
    medians = _median_samples(clients)
    return {
        client.id: client.samples
        if times is None or client.id not in medians
        else min(client.samples, int(times * medians[client.id]))
        for client in clients
    }


def reaches(clients: Sequence[ClientInfo], times: float | None) -> dict[str, float]:
    """Client -> how much longer than the median its updates may be: its samples over theirs, from 1 to ``times``.

    Who has more samples trains for more steps, and comes as much farther.
    """
    medians = _median_samples(clients)
    most = float("inf") if times is None else times
    return {
        # without a median of peers nobody has more reach than others
        client.id: min(max(client.samples / medians.get(client.id, max(client.samples, 1)), 1.0), most)
        for client in clients
    }


def _median_samples(clients: Sequence[ClientInfo]) -> dict[str, float]:
    trained = [client for client in clients if client.samples > 0]  # those without samples would only lower it
    kinds = {(client.architecture, client.modalities): client for client in clients}
    peers = {kind: _peer_samples(client, trained) for kind, client in kinds.items()}
    medians = {kind: median(samples) for kind, samples in peers.items() if len(samples) >= ENOUGH}
    of_clients = ((client.id, medians.get((client.architecture, client.modalities))) for client in clients)
    return {client: value for client, value in of_clients if value is not None}


def _peer_samples(client: ClientInfo, trained: Sequence[ClientInfo]) -> list[int]:
    """Samples of the clients of one architecture; where these are too few, of all that share a modality."""
    own = [other.samples for other in trained if other.architecture == client.architecture]
    if len(own) >= ENOUGH:
        return own
    return [other.samples for other in trained if set(other.modalities) & set(client.modalities)]
