"""From the states of a sequence to one vector, whatever the amount of padding, without a device sync.

Padding stands after the last valid position.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def valid_positions(tokens: Int64[Tensor, "b l"], pad: int) -> Bool[Tensor, "b l"]:
    """True where a token is not padding.

    >>> valid_positions(torch.tensor([[5, 7, 0]]), pad=0)
    tensor([[ True,  True, False]])
    """
    return tokens != pad


def lengths_of(mask: Bool[Tensor, "b l"]) -> Int64[Tensor, " b"]:
    """Number of valid positions of each row, at least 1: an empty text is read as one padding token."""
    return mask.sum(1).clamp(min=1)


def masked_mean(x: Float[Tensor, "b l c"], mask: Bool[Tensor, "b l"]) -> Float[Tensor, "b c"]:
    """Mean over the valid positions; zero where there is none.

    >>> masked_mean(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[2.]])
    """
    weights = mask.unsqueeze(-1).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


def last_valid(x: Float[Tensor, "b l c"], lengths: Int64[Tensor, " b"]) -> Float[Tensor, "b c"]:
    """The last valid position of each row.

    >>> last_valid(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([2]))
    tensor([[3.]])
    """
    # gathered, not indexed row by row: no length is asked of the device
    index = (lengths - 1).view(-1, 1, 1).expand(-1, 1, x.shape[-1])
    return x.gather(1, index).squeeze(1)


def reversed_valid(x: Float[Tensor, "b l c"], lengths: Int64[Tensor, " b"]) -> Float[Tensor, "b l c"]:
    """The valid part of each row back to front; padding stays where it is.

    >>> reversed_valid(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([2])).flatten()
    tensor([3., 1., 9.])
    """
    position = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths.unsqueeze(1) - 1 - position
    index = torch.where(mirrored >= 0, mirrored, position)
    return x.gather(1, index.unsqueeze(-1).expand_as(x))


def trimmed(tokens: Int64[Tensor, "b l"], pad: int) -> Int64[Tensor, "b m"]:
    """Drop columns that are all padding; on the CPU only, as elsewhere the width would cost a sync.

    Not while traced for an export or a compilation either, as the width depends on the data.

    >>> trimmed(torch.tensor([[5, 7, 0, 0], [5, 0, 0, 0]]), pad=0)
    tensor([[5, 7],
            [5, 0]])
    """
    if tokens.device.type != "cpu" or tokens.shape[1] == 0 or torch.compiler.is_compiling():
        return tokens
    return tokens[:, : max(1, int(valid_positions(tokens, pad).sum(1).max()) if len(tokens) else 1)]
