"""Modalities of which a sample has several views, as methods need that compare two of them (BYOL)."""

from __future__ import annotations

import torch

from polyfed.data.samples import Samples


def random_views(samples: Samples) -> list[str]:
    """Modalities whose training view takes anything from its random stream, so that two draws of it differ."""
    return [name for name in samples.modalities if _draws(samples, name)]


def _draws(samples: Samples, modality: str) -> bool:
    # no view says of itself whether it is random: look whether making one moves the stream
    stream = torch.Generator()
    before = stream.get_state()
    samples.inputs[modality](samples.rows[modality][:1], stream)
    return not torch.equal(before, stream.get_state())
