"""How many samples a client counts for in averages, whatever it says it has."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from polyfed.federation.client import ClientInfo
from polyfed.privacy.clipping import ENOUGH


def counted(clients: Sequence[ClientInfo], times: float | None) -> dict[str, int]:
    """Client -> samples that it counts for in averages: as many as it joined with, at most ``times`` its median."""
    medians = _median_samples(clients)
    return {
        client.id: client.samples
        if times is None or client.id not in medians
        else min(client.samples, int(times * medians[client.id]))
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
