"""What clients see alike on the public set: each compares its rows with its own, so that no common space is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.ensemble import Ensembled, Rows
from polyfed.losses.distillation import relational_kl


class Relations(NamedTuple):
    """Similarities between samples s and t of a batch, row s and column t."""

    cosines: Float[Tensor, "b b"]
    """Weighted mean over clients; 0 where nobody compares."""
    known: Bool[Tensor, "b b"]
    """Pairs that some client compares."""


def relations(source: Mapping[str, Rows], target: Mapping[str, Rows], index: Int64[Tensor, " b"]) -> Relations:
    """sum_i w_i(s, t) cos(u_i(s), v_i(t)) over the clients i with both outputs, w softmax of (l_i(s) + l_i(t)) / 2.

    Args:
        source: client -> its rows u_i and log weights l_i of one output on all samples.
        target: the same of another output, or of the same.
        index: the samples to compare. Memory: clients x b x b.
    """
    cosines = [torch.zeros(len(index), len(index), device=index.device)]
    logs = [torch.full_like(cosines[0], -torch.inf)]  # of nobody: a batch that nobody compares has relations, too
    for client in [name for name in source if name in target]:  # in a fixed order, for equal bits
        (u, own), (v, others) = (side[client] for side in (source, target))
        u, v = (F.normalize(rows[index].float(), dim=1) for rows in (u, v))
        cosines.append(u @ v.T)
        logs.append((own[index, None] + others[index]) / 2)
    weights = torch.stack(logs).softmax(0).nan_to_num(0.0)
    return Relations((weights * torch.stack(cosines)).sum(0), (weights > 0).any(0))


def relational_losses(
    outputs: Mapping[str, Float[Tensor, "b d"]],
    targets: Mapping[str, Ensembled],
    index: Int64[Tensor, " b"],
    items: Int64[Tensor, " b"],
    tau: float,
) -> dict[str, Tensor]:
    """By output: mean over the outputs that it is compared with, itself included, of ``relational_kl``.

    Args:
        outputs: the student's.
        targets: with clients' rows.
        index: the samples of the batch among those of the targets.
        items: of these samples. Within an output samples of one item are not compared: a picture and its copy under
            another caption have cosine 1 for everybody, which would drown what is to be learnt.
        tau: temperature.
    """
    strangers = items[:, None] != items
    losses = {}
    for name, ensembled in targets.items():
        parts = []
        for other, compared in targets.items():
            cosines, known = relations(ensembled.rows, compared.rows, index)
            known = known & strangers if other == name else known
            parts.append(relational_kl(outputs[name], outputs[other], cosines, known, tau))
        losses[name] = torch.stack(parts).mean()
    return losses
