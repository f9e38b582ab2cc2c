"""Contrast of a student with its targets, among targets of the batch and of a queue (FedMKD, NeurIPS 2024)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision


@in_full_precision
def queue_contrast(
    student: Float[Tensor, "b d"],
    targets: Float[Tensor, "b d"],
    queue: Float[Tensor, "q d"],
    items: Int[Tensor, " b"],
    queued: Int[Tensor, " q"],
    tau: float = 0.1,
) -> Float[Tensor, ""]:
    """-log exp(s_k . t_k / tau) / sum_j exp(s_k . t_j / tau), mean over the batch.

    j runs over the sample itself and all targets, of batch and queue, that belong to other items. In a small public
    set the queue would otherwise hold a sample's own target of the epoch before as a negative.

    Args:
        student: outputs that learn, unit L2 norm.
        targets: their targets, unit L2 norm; they may carry gradient.
        queue: earlier targets, unit L2 norm; constants.
        items: number of the item behind each sample of the batch.
        queued: the same of the queue.
        tau: temperature.
    """
    own = items[:, None] == torch.cat([items, queued])
    own[:, : len(items)].fill_diagonal_(False)
    logits = student @ torch.cat([targets, queue.to(targets)]).T / tau
    return F.cross_entropy(logits.masked_fill(own, -math.inf), torch.arange(len(student), device=student.device))
