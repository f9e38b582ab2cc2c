"""What clients do with an adapter of their own beside the one that is exchanged (``models.personal_adapters``)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from polyfed.federation.client import Client
from polyfed.models.personal_adapters import (
    PERSONAL,
    SHARED,
    adapter_tensors,
    load_adapter,
    renew_adapter,
    training_only,
    use_adapters,
)

STATE = "personal"
"""What a method keeps on a client: ``keeps = {STATE: Lifetime.RUN}``."""
SHARED_ALONE: Mapping[str, float | Tensor] = {SHARED: 1.0}
"""Adapters in use where nothing is personal."""


def restore_personal(client: Client) -> bool:
    """Have the client's own adapter in its model: as it kept it, or a new one; whether it has kept one.

    One live model serves all clients of an architecture, so each step of a method that uses it begins with this.
    """
    kept = client.state.get(STATE)
    if kept:
        load_adapter(client.model, kept)
    else:
        renew_adapter(client.model, PERSONAL, client.clock.seed, client.name)
    use_adapters(client.model, SHARED_ALONE)
    return bool(kept)


def keep_personal(client: Client) -> None:
    """Have the client's own adapter last."""
    client.state[STATE] = adapter_tensors(client.model, PERSONAL)


def train_personal(
    client: Client, weights: Mapping[str, float | Tensor], epochs: int, steps: int | None = None
) -> None:
    """Train the client's own adapter alone on its task, and keep it.

    Args:
        client: with ``restore_personal``.
        weights: of the adapters that work meanwhile; all but the client's own stay as they are.
        epochs: passes over its samples.
        steps: so many batches instead.
    """
    client.trainer()  # of all that is trained at times, before the rest is put to rest
    use_adapters(client.model, weights)
    with training_only(client.model, PERSONAL):
        client.fit(client.train, epochs=epochs, steps=steps, purpose="personal")
    use_adapters(client.model, SHARED_ALONE)
    keep_personal(client)
