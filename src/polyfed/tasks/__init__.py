"""Tasks, and the evaluation that they share: the mode of models, and each distinct row once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from polyfed.data.samples import Samples
from polyfed.models.model import Embedder


@contextlib.contextmanager
def evaluating(*modules: Embedder | nn.Module | None, inference: bool = True) -> Iterator[None]:
    """Run a block in evaluation mode without gradients; afterwards every submodule has its former mode.

    Tensors made in it cannot enter a graph later on, unless ``inference`` is off.
    """
    modes = {part: part.training for module in modules if isinstance(module, nn.Module) for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        with torch.inference_mode() if inference else torch.no_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training


def encoded_rows(
    encode: Callable[[str, Tensor], Float[Tensor, "b d"]],
    device: torch.device,
    modality: str,
    samples: Samples,
    batch_size: int,
) -> tuple[Float[Tensor, "rows d"], Int64[Tensor, " n"]]:
    """Every distinct row of a modality by ``encode``, without absent ones, and the row of each sample.

    A sample that lacks the modality has row 0 among rows that then start at 1.
    """
    rows, inverse_index = samples.distinct(modality)
    blocks = samples.loads(modality, torch.split(rows[rows >= 0], batch_size))
    return torch.cat([encode(modality, block.to(device)) for block in blocks]), inverse_index.to(device)
