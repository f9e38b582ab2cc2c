"""Contrasts with others' representations: CreamFL (Yu et al. 2023), MOON (Li et al. 2021), FedMKD (NeurIPS 2024)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.log_sum_exp import log_partition
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
    counts: Float[Tensor, " P"] | None = None,
    chunk: int = 4096,
) -> Float[Tensor, ""]:
    """Cross-entropy of each representation against the other modality's public set (CreamFL, Eq. 1), mean over b.

    -log exp(u_k . t_k / tau) / sum_j exp(u_k . t_j / tau), in memory b x ``chunk``; gradient to ``u`` only.

    Args:
        u: Representations of public samples in one modality.
        anchors: Global representations of the public set in the other modality; with ``counts`` each distinct one is
            given once. Constants.
        positive: Index among them of each row of ``u``.
        tau: Temperature; a higher one softens the contrast (the paper has none, the released code 0.5).
        items: Id of the item behind each anchor; siblings (other captions of the same image) are then
            left out of the denominator.
        include_self: True keeps the positive in the denominator, as in Eq. 1 and the released code. Without it a row
            without negatives counts as 0.
        counts: Number of samples per anchor; None: one.
        chunk: Anchors at a time; more need more memory and less time.

    >>> anchors = torch.eye(3)
    >>> [round(float(inter_modal(anchors, anchors, torch.arange(3), tau)), 3) for tau in (0.5, 1.0)]
    [0.24, 0.551]
    """
    anchors = anchors.detach()
    partition = log_partition(u, anchors, positive, tau, items, include_self, chunk, counts)
    # the positive logit apart: a chunk that holds it is gone by now
    loss = partition - (u * anchors[positive]).sum(1) / tau
    return loss.masked_fill(partition == -math.inf, 0).mean()


@in_full_precision
def intra_modal(
    u: Float[Tensor, "b d"], consensus: Float[Tensor, "b d"], previous: Float[Tensor, "b d"], tau: float = 1.0
) -> Float[Tensor, ""]:
    """Contrast towards the global, away from the previous representation (CreamFL, Eq. 2), mean over b.

    -log exp(u.g / tau) / (exp(u.g / tau) + exp(u.p / tau)) = softplus(u.(p - g) / tau); gradient to ``u`` only.

    Args:
        u: The client's representations of public samples.
        consensus: Global representations g of the same samples and modality.
        previous: Representations p of them by the client's model at the end of its last participation.
        tau: Temperature; a higher one softens the contrast (the paper has none, the released code 0.5).

    >>> u, previous = torch.eye(2), -torch.eye(2)
    >>> round(float(intra_modal(u, consensus=u, previous=previous)), 3), round(float(intra_modal(u, previous, u)), 3)
    (0.127, 2.127)
    """
    return F.softplus((u * (previous - consensus).detach()).sum(1) / tau).mean()


@in_full_precision
def model_contrast(
    z: Float[Tensor, "b d"], received: Float[Tensor, "b d"], previous: Float[Tensor, "b d"], tau: float = 0.5
) -> Float[Tensor, ""]:
    """Contrast towards representations of the received model, away from the client's previous one's (MOON, Eq. 3).

    -log exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) + exp(cos(z, z_prev) / tau)), mean over b: CreamFL's
    Eq. 2 on vectors of any length. Gradient to ``z`` only.

    Args:
        z: Representations of the model in training.
        received: Representations z_glob of the model that the server sent.
        previous: Representations z_prev of the client's model at the end of its previous participation.
        tau: temperature; a higher one softens the contrast.

    >>> z = torch.eye(2)
    >>> round(float(model_contrast(z, received=5 * z, previous=-z)), 3)
    0.018
    """
    unit, towards, away = (F.normalize(values, dim=1) for values in (z, received, previous))
    return intra_modal(unit, towards, away, tau)


@in_full_precision
def queue_contrast(
    student: Float[Tensor, "b d"],
    targets: Float[Tensor, "b d"],
    queue: Float[Tensor, "q d"],
    items: Int[Tensor, " b"],
    queued: Int[Tensor, " q"],
    tau: float = 0.1,
) -> Float[Tensor, ""]:
    """-log exp(s_k . t_k / tau) / sum_j exp(s_k . t_j / tau), mean over the batch (FedMKD).

    j runs over the sample itself and all targets, of batch and queue, that belong to other items. In a small public
    set the queue would otherwise hold a sample's own target of the epoch before as a negative.

    Args:
        student: outputs that learn, unit L2 norm.
        targets: their targets, unit L2 norm; they may carry gradient.
        queue: earlier targets, unit L2 norm; constants.
        items: number of the item behind each sample of the batch.
        queued: the same of the queue.
        tau: temperature; a higher one softens the contrast.

    >>> x, queue = torch.eye(3)[:2], torch.eye(3)[2:]
    >>> items, queued = torch.arange(2), torch.tensor([2])
    >>> [round(float(queue_contrast(x, x, queue, items, queued, tau)), 3) for tau in (0.1, 1.0)]
    [0.0, 0.551]
    """
    siblings = items[:, None] == torch.cat([items, queued])
    # a sample is its own positive, not its sibling
    siblings[:, : len(items)].fill_diagonal_(False)
    logits = student @ torch.cat([targets, queue.to(targets)]).T / tau
    return F.cross_entropy(logits.masked_fill(siblings, -math.inf), torch.arange(len(student), device=student.device))
