"""Local contrastive regularisation of CreamFL (Yu et al. 2023, section 3.2)."""

from __future__ import annotations

import math

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.log_partition import log_partition
from polyfed.losses.precision import in_full_precision


@in_full_precision
def inter_modal(
    u: Float[Tensor, "b d"],
    anchors: Float[Tensor, "P d"],
    positive: Int[Tensor, " b"],
    tau: float = 1.0,
    *,
    items: Int[Tensor, " P"] | None = None,
    include_self: bool = True,
    chunk: int = 4096,
) -> Float[Tensor, ""]:
    """Cross-entropy of each representation against the other modality's public set (Eq. 1), mean over b.

    -log exp(u_k . t_k / tau) / sum_j exp(u_k . t_j / tau), in memory b x ``chunk``; gradient to ``u`` only.

    Args:
        u: representations of public samples in one modality.
        anchors: global representations of the whole public set in the other modality; constants.
        positive: index in the public set of each row of ``u``.
        tau: temperature (the paper has none, the released code 0.5).
        items: id of the item behind each public sample; siblings (other captions of the same image) are then
            left out of the denominator.
        include_self: whether the positive is part of the denominator, as in Eq. 1 and the released code.
            Without it a row that has no negative left counts as 0.
        chunk: anchors at a time.
    """
    anchors = anchors.detach()
    partition = log_partition(u, anchors, positive, tau, items, include_self, chunk)
    loss = partition - (u * anchors[positive]).sum(1) / tau
    return loss.masked_fill(partition == -math.inf, 0).mean()


@in_full_precision
def intra_modal(
    u: Float[Tensor, "b d"],
    consensus: Float[Tensor, "b d"],
    previous: Float[Tensor, "b d"],
    tau: float = 1.0,
) -> Float[Tensor, ""]:
    """Two-way contrast towards the global, away from the previous representation (Eq. 2), mean over b.

    -log exp(u.g / tau) / (exp(u.g / tau) + exp(u.p / tau)) = softplus(u.(p - g) / tau); gradient to ``u``
    only.

    Args:
        u: the client's representations of public samples.
        consensus: g, the global representations of the same samples and modality.
        previous: p, what the client's own model gave for them at the end of its last participation.
        tau: temperature (the paper has none, the released code 0.5).
    """
    return F.softplus((u * (previous - consensus).detach()).sum(1) / tau).mean()
