"""Soft contrastive pair loss of PCME (Chun et al. 2021), as CreamFL and FedAFD use it for retrieval."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.losses.info_nce import Reduction
from polyfed.losses.precision import in_full_precision

_EPSILON = 1e-6  # added to squares, so that the root has a gradient where two representations coincide


@in_full_precision
def soft_contrastive(
    u: Float[Tensor, "b d"],
    v: Float[Tensor, "b d"],
    shift: Float[Tensor, ""],
    scale: Float[Tensor, ""],
    items: Int[Tensor, " b"] | None = None,
    *,
    reduction: Reduction = "sum",
) -> Float[Tensor, ""]:
    """Logistic loss on the distance of every pair; rows of equal index match, all others do not.

    With D_ij = sqrt(|u_i - v_j|^2 + 1e-6), s_ij = shift - scale D_ij and m_ij = +1 if i = j else -1, each
    direction adds log(e^s + e^-s) - m s = softplus(-2 m_ij s_ij). Both directions have the same value, hence
    ``sum`` is 2 sum_ij softplus(-2 m_ij s_ij) and ``mean`` is that divided by its 2 b^2 terms.

    Args:
        u: representations of one modality.
        v: representations of the other, in the same order.
        shift: b in the papers, 15 at the start; a higher one lets pairs match at a greater distance.
        scale: a in the papers, 15 at the start; a higher one makes the step between match and mismatch steeper.
        items: id of the item behind each pair; pairs of two rows of the same item (two captions of one image)
            that do not match by index are left out instead of pushed apart.
        reduction: ``sum`` as in the papers (clip the gradient: it grows with b^2), or ``mean``.

    >>> z, shift, scale = torch.eye(3), torch.tensor(1.0), torch.tensor(2.0)
    >>> [round(float(soft_contrastive(z, v, shift, scale)), 2) for v in (z, z.roll(1, 0))]
    [1.07, 34.99]
    """
    distance = _distances(u, v)
    sign = torch.ones_like(distance).fill_diagonal_(-1)
    terms = F.softplus((shift - scale * distance) * (2 * sign))
    if items is not None:
        terms = terms.masked_fill((items[:, None] == items) & (sign > 0), 0)
    # distances are symmetric: the second direction has the same value
    return 2 * terms.sum() if reduction == "sum" else terms.sum() / terms.numel()


def _distances(u: Float[Tensor, "b d"], v: Float[Tensor, "k d"]) -> Float[Tensor, "b k"]:
    norms = torch.linalg.vecdot(u, u)[:, None] + torch.linalg.vecdot(v, v)
    # one product instead of b x b x d differences; rounding may leave a negative square
    return (torch.addmm(norms, u, v.T, alpha=-2).relu() + _EPSILON).sqrt()


class SoftContrastive(nn.Module):
    """The pair loss with its learnable ``shift`` and ``scale``.

    >>> loss = SoftContrastive()
    >>> z = torch.eye(4)
    >>> bool(loss(z, z) < loss(z, z.roll(1, 0)))
    True
    """

    def __init__(self, shift: float = 15.0, scale: float = 15.0, *, reduction: Reduction = "sum") -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))
        self.scale = nn.Parameter(torch.tensor(scale))
        self.reduction: Reduction = reduction

    def forward(
        self, u: Float[Tensor, "b d"], v: Float[Tensor, "b d"], items: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, ""]:
        """Loss of a batch of pairs; see ``soft_contrastive``."""
        return soft_contrastive(u, v, self.shift, self.scale, items, reduction=self.reduction)
