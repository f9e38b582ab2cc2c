"""Log-sum-exp of a batch's logits against many anchors, in chunks, with its gradient from the same pass."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyfed.losses.running_log_sum_exp import RunningLogSumExp, RunningSoftmaxMean


def log_partition(
    u: Float[Tensor, "b d"],
    anchors: Float[Tensor, "P d"],
    positive: Int[Tensor, " b"],
    tau: float,
    items: Int[Tensor, " P"] | None,
    include_self: bool,
    chunk: int,
    counts: Float[Tensor, " P"] | None = None,
) -> Float[Tensor, " b"]:
    """log sum_j exp(u . anchor_j / tau) over the samples whose anchor the row may see; -inf if there are none.

    Differentiable once, in ``u`` alone. The gradient is the softmax-weighted mean anchor / tau; the forward
    pass folds it beside the sum, so it costs one matrix product more and no b x P matrix is ever held.

    Args:
        u: rows.
        anchors: constants.
        positive: each row's own anchor.
        tau: temperature.
        items: id of the item behind each anchor; samples that share it with the row's own are not seen.
        include_self: whether the row's own sample is seen.
        chunk: anchors at a time.
        counts: how many samples have each anchor; None: one.
    """
    value = _LogPartition.apply(  # type: ignore[no-untyped-call]
        u, anchors, positive, tau, items, include_self, chunk, counts
    )
    return cast("Tensor", value)


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        anchors: Tensor,
        positive: Tensor,
        tau: float,
        items: Tensor | None,
        include_self: bool,
        chunk: int,
        counts: Tensor | None,
    ) -> Tensor:
        running = RunningSoftmaxMean(u, "e") if ctx.needs_input_grad[0] else RunningLogSumExp(u.new_empty(len(u)), "e")
        families = torch.arange(len(anchors), device=u.device) if items is None else items
        # a row's family is left out as a whole, and what it sees of its own anchor added
        seen = _own_copies(positive, items, include_self, counts)
        for here in (slice(start, start + chunk) for start in range(0, len(anchors), chunk)):
            part, times = anchors[here], None if counts is None else counts[here]
            # divided after the product, as in the formula: scaled rows would round differently
            logits = (u @ part.T).div_(tau)
            if seen is not None:  # in place: the tile is not needed again
                logits.masked_fill_(families[positive][:, None] == families[here], -math.inf)
            if isinstance(running, RunningSoftmaxMean):
                running.add_weighted(logits, part, times)
            else:
                running.add(logits, counts=times)
        if seen is not None:
            _add_own(running, u, anchors[positive], tau, seen)
        if isinstance(running, RunningSoftmaxMean):
            # [b, d], all that the backward pass needs: it runs over no anchor again
            ctx.save_for_backward(running.mean(tau))
        return running.result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (mean,) = ctx.saved_tensors
        return gradient[:, None] * mean, None, None, None, None, None, None, None


def _own_copies(
    positive: Tensor, items: Tensor | None, include_self: bool, counts: Tensor | None
) -> Float[Tensor, " b"] | None:
    """How many samples with its own anchor each row sees; None: all."""
    if items is not None:
        return torch.full_like(positive, float(include_self), dtype=torch.float32)
    if include_self:
        return None
    return torch.zeros_like(positive, dtype=torch.float32) if counts is None else counts[positive] - 1


def _add_own(running: RunningLogSumExp, u: Tensor, own: Tensor, tau: float, seen: Tensor) -> None:
    logit = (u * own).sum(1).div_(tau).masked_fill_(seen == 0, -math.inf)
    if isinstance(running, RunningSoftmaxMean):
        running.add_vectors(logit, own, seen)
    else:
        running.add(logit[:, None], counts=seen[:, None])
