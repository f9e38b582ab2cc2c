"""How models represent samples that all may see."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.samples import Samples
from polyfed.models.model import Model


@torch.no_grad()
def represented(
    model: Model, modality: str, samples: Samples, index: Int64[Tensor, " n"], batch: int, whose: str
) -> Float[Tensor, "n d"]:
    """Representations (unit norm) of some samples in one modality, on the CPU.

    Raises:
        DataError: one is not finite.
    """
    load, rows = samples.inputs[modality], samples.rows[modality][index]
    parts = [model.represent(modality, load(part).to(model.device)).float().cpu() for part in torch.split(rows, batch)]
    values = torch.cat(parts)
    if not bool(values.isfinite().all()):
        raise DataError(f"representations of '{modality}' by {whose} hold NaN or infinity: its model has diverged")
    return values


def one_of_each_item(items: Int64[Tensor, " n"]) -> Int64[Tensor, " k"]:
    """Positions of the first sample of every item: siblings share a picture and would count it several times."""
    values, inverse = torch.unique(items, return_inverse=True)
    first = torch.full((len(values),), len(items))
    return first.scatter_reduce(0, inverse, torch.arange(len(items)), "amin").sort().values
