"""Random streams: every draw comes from a generator derived from (seed, and what it is for)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order, the same on every machine."""
    # types are part of the text: client '1' and round 1 are different streams
    text = "\x1f".join([f"{type(part).__name__}:{part}" for part in parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator of its own for the purpose that ``parts`` name, e.g. (seed, round, client, "batches")."""
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextlib.contextmanager
def isolated(*parts: int | str) -> Iterator[None]:
    """Run a block with torch's global generators seeded from ``parts``, and restore them afterwards.

    Layers such as dropout, and weight initialisation, draw from the global generators; inside this block what they
    draw depends on ``parts`` alone, not on what ran before.
    """
    kept, (gpus, is_apple) = torch.default_generator.get_state(), _backends()
    kept_on = {gpu: torch.cuda.get_rng_state(gpu) for gpu in range(gpus)}
    seed = derive_seed(*parts)
    # torch.manual_seed, but only for backends that are there: the others take 20 times as long as the CPU's own
    torch.default_generator.manual_seed(seed)
    if gpus:
        torch.cuda.manual_seed_all(seed)
    if is_apple:
        torch.mps.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(kept)
        for gpu, state in kept_on.items():
            torch.cuda.set_rng_state(state, gpu)


@functools.cache  # to ask takes longer than to seed
def _backends() -> tuple[int, bool]:
    """Number of CUDA devices, and whether there is Apple's."""
    return torch.cuda.device_count(), torch.backends.mps.is_available()
