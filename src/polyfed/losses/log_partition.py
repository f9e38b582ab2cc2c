"""Log-sum-exp of a batch's logits against many anchors, in chunks, with its gradient from the same pass."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
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
) -> Float[Tensor, " b"]:
    """log sum_j exp(u . anchor_j / tau) over the anchors that the row may see; -inf if there are none.

    Differentiable once, in ``u`` alone. The gradient is the softmax-weighted mean anchor / tau; the forward
    pass folds it beside the sum, so it costs one matrix product more and no b x P matrix is ever held.

    Args:
        u: rows.
        anchors: constants.
        positive: each row's own anchor.
        tau: temperature.
        items: id of the item behind each anchor; anchors that share it with the row's own are not seen.
        include_self: whether the row's own anchor is seen.
        chunk: anchors at a time.
    """
    value = _LogPartition.apply(u, anchors, positive, tau, items, include_self, chunk)  # type: ignore[no-untyped-call]
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
    ) -> Tensor:
        running = RunningSoftmaxMean(u, "e") if ctx.needs_input_grad[0] else RunningLogSumExp(u.new_empty(len(u)), "e")
        for start in range(0, len(anchors), chunk):
            part = anchors[start : start + chunk]
            # divided after the product, as in the formula: scaled rows would round differently
            logits = (u @ part.T).div_(tau)
            hidden = _hidden(positive, start, len(part), items, include_self)
            if hidden is not None:  # in place: the tile is not needed again
                logits.masked_fill_(hidden, -math.inf)
            if isinstance(running, RunningSoftmaxMean):
                running.add_weighted(logits, part)
            else:
                running.add(logits)
        if isinstance(running, RunningSoftmaxMean):
            # [b, d], all that the backward pass needs: it runs over no anchor again
            ctx.save_for_backward(running.mean(tau))
        return running.result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (mean,) = ctx.saved_tensors
        return gradient[:, None] * mean, None, None, None, None, None, None


def _hidden(
    positive: Tensor, start: int, size: int, items: Tensor | None, include_self: bool
) -> Bool[Tensor, "b n"] | None:
    """Which of the anchors start .. start + size a row does not see; None: it sees all."""
    if items is None and include_self:
        return None
    own = positive[:, None] == torch.arange(start, start + size, device=positive.device)
    if items is None:
        return own
    siblings = items[positive][:, None] == items[start : start + size]
    return siblings & ~own if include_self else siblings
