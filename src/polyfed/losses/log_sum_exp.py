"""Log-sum-exp of logits that arrive in tiles and are never in memory together."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar, Literal, Self, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

_VANISHING_BITS = -4096.0  # its power of two is 0 in any type, and its product with that 0 is a number


class RunningLogSumExp:
    """log_b sum_j b^(x_j) of each row, relative to a running maximum, so that no power overflows.

    With base 2 the logits are in bits, x / ln 2: on a CPU 2^x takes a third of the time of e^x.

    Args:
        like: Tensor with the shape [r], type and device of the result.
        base: Base b, "e" or 2.

    Attributes:
        peak: Largest logit of each row so far.
        total: Sum of the powers of the logits minus the peak.

    >>> logits = torch.tensor([[0.0, 1000.0, 1000.0]])
    >>> running = RunningLogSumExp(logits[:, 0], "e")
    >>> for tile in logits.split(2, dim=1):
    ...     _ = running.add(tile.clone())
    >>> round(float(running.result()) - 1000, 3)
    0.693
    """

    _sums: ClassVar[tuple[str, ...]] = ("total", "peak")

    def __init__(self, like: Float[Tensor, " r"], base: Literal["e", 2]) -> None:
        self.total = torch.zeros_like(like)
        # not -inf: a row whose logits are all -inf would have a drop of -inf less -inf
        self.peak = torch.full_like(like, torch.finfo(like.dtype).min)
        self._power = torch.exp_ if base == "e" else torch.Tensor.exp2_
        self._log = torch.log if base == "e" else torch.log2

    def add(
        self,
        tile: Float[Tensor, "r n"],
        largest: Float[Tensor, " r"] | None = None,
        counts: Float[Tensor, " n"] | Float[Tensor, "r n"] | None = None,
    ) -> Float[Tensor, "r n"]:
        """Add the logits of a tile, which is overwritten, and return their powers, relative to the new peak.

        Args:
            tile: Logits.
            largest: Largest logit of each row, if known.
            counts: Multiplicity of each logit; None: one.
        """
        peak = torch.maximum(self.peak, tile.amax(1) if largest is None else largest)
        drop = self.peak - peak
        shrink = self._rescale(drop)
        powers = self._powers(tile.sub_(peak[:, None]), counts)
        # older sums are relative to the old peak
        self.total.mul_(shrink).add_(_summed(powers, counts))
        self.peak = peak
        return powers

    def of_rows(self, index: Int[Tensor, " m"]) -> Self:
        """Independent sums of the rows at ``index``, which may repeat."""
        chosen = copy.copy(self)
        for name in self._sums:
            setattr(chosen, name, getattr(self, name)[index])
        return chosen

    def result(self) -> Float[Tensor, " r"]:
        return self.peak + self._log(self.total)

    def _rescale(self, drop: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
        """Factor of all sums so far, now that the peak has risen by ``-drop``; subclasses rescale theirs."""
        return self._power(drop)

    def _powers(self, logits: Float[Tensor, "r n"], counts: Tensor | None) -> Float[Tensor, "r n"]:
        """Powers of logits that are relative to the peak; may overwrite them."""
        return self._power(logits)


class BoundedLogSumExp(RunningLogSumExp):
    """Log-sum-exp of logits known to need no shift: two passes over a tile instead of four.

    >>> running = BoundedLogSumExp(torch.zeros(1), 2)
    >>> _ = running.add(torch.zeros(1, 4))
    >>> float(running.result())
    2.0
    """

    def add(
        self,
        tile: Float[Tensor, "r n"],
        largest: Float[Tensor, " r"] | None = None,
        counts: Float[Tensor, " n"] | Float[Tensor, "r n"] | None = None,
    ) -> Float[Tensor, "r n"]:
        """Add the logits of a tile, which is overwritten, and return their powers."""
        powers = self._power(tile)
        self.total.add_(_summed(powers, counts))
        return powers

    def result(self) -> Float[Tensor, " r"]:
        return self._log(self.total)


class RunningSoftmaxMean(RunningLogSumExp):
    """Also sums the vectors that the powers weigh, sum_j b^(x_j) v_j: the numerator of a softmax's mean.

    >>> vectors = torch.eye(2)
    >>> running = RunningSoftmaxMean(torch.zeros(1, 2), "e")
    >>> running.add_weighted(torch.zeros(1, 2), vectors)
    >>> running.mean(scale=1.0)
    tensor([[0.5000, 0.5000]])
    """

    _sums = ("total", "peak", "_weighted")

    def __init__(self, like: Float[Tensor, "r d"], base: Literal["e", 2]) -> None:
        super().__init__(like.new_empty(len(like)), base)
        self._weighted = torch.zeros_like(like)

    def add_weighted(
        self, tile: Float[Tensor, "r n"], vectors: Float[Tensor, "n d"], counts: Float[Tensor, " n"] | None = None
    ) -> None:
        """Add the logits of a tile, which is overwritten, and the vectors behind its columns."""
        powers = self.add(tile, counts=counts)
        self._weighted.addmm_(powers if counts is None else powers.mul_(counts), vectors)

    def add_vectors(
        self, logits: Float[Tensor, " r"], vectors: Float[Tensor, "r d"], counts: Float[Tensor, " r"]
    ) -> None:
        """Add one logit a row, and the vector behind it, as often as it counts."""
        powers = self.add(logits[:, None], counts=counts[:, None])
        self._weighted.addcmul_(powers * counts[:, None], vectors)

    def mean(self, scale: float) -> Float[Tensor, "r d"]:
        """Softmax-weighted mean of the vectors over ``scale``; 0 for a row that saw none. Ends the sums."""
        return self._weighted.div_(self.total.clamp_min(1e-30)[:, None] * scale)

    def _rescale(self, drop: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
        shrink = super()._rescale(drop)
        self._weighted.mul_(shrink[:, None])
        return shrink


class RunningEntropy(RunningLogSumExp):
    """Also sums logit x power, both relative to the peak: exact where the entropy is small.

    The powers, which must not replace the logits, are written into ``scratch`` where it is large enough.

    >>> running = RunningEntropy(torch.zeros(1), scratch=torch.empty(4))
    >>> _ = running.add(torch.zeros(1, 4))  # four logits alike: two bits
    >>> float(running.entropy())
    2.0
    """

    _sums = ("total", "peak", "_moment")

    def __init__(self, like: Float[Tensor, " r"], scratch: Float[Tensor, " s"]) -> None:
        super().__init__(like, 2)
        self._scratch = scratch
        self._moment = torch.zeros_like(like)

    def entropy(self) -> Float[Tensor, " r"]:
        return (self.total.log2() - self._moment / self.total).clamp_(min=0)

    def _rescale(self, drop: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
        shrink = drop.exp2()
        self._moment.addcmul_(drop, self.total).mul_(shrink)
        return shrink

    def _powers(self, logits: Float[Tensor, "r n"], counts: Tensor | None) -> Float[Tensor, "r n"]:
        logits.clamp_(min=_VANISHING_BITS)  # -inf x 0 is NaN
        fits = logits.numel() <= len(self._scratch)
        powers = torch.exp2(logits, out=self._scratch[: logits.numel()].view_as(logits) if fits else None)
        self._moment.add_(_summed(logits.mul_(powers), counts))
        return powers


def _summed(
    values: Float[Tensor, "r n"], counts: Float[Tensor, " n"] | Float[Tensor, "r n"] | None
) -> Float[Tensor, " r"]:
    if counts is None:
        return values.sum(1)
    return values @ counts if counts.ndim == 1 else (values * counts).sum(1)


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
    pass folds it together with the sum, so it costs one matrix product more and no b x P matrix is ever held.

    Args:
        u: rows.
        anchors: constants.
        positive: each row's own anchor.
        tau: temperature; a higher one flattens the softmax.
        items: id of the item behind each anchor; samples that share it with the row's own are not seen.
        include_self: whether the row's own sample is seen.
        chunk: anchors at a time.
        counts: how many samples have each anchor; None: one.

    >>> u, anchors = torch.zeros(1, 2), torch.eye(2)
    >>> out = log_partition(u, anchors, torch.tensor([0]), tau=1.0, items=None, include_self=True, chunk=1)
    >>> round(float(out.exp()), 3)
    2.0
    """
    value: Tensor = cast("Any", _LogPartition).apply(u, anchors, positive, tau, items, include_self, chunk, counts)
    return value


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
            own = anchors[positive]
            logit = (u * own).sum(1).div_(tau).masked_fill_(seen == 0, -math.inf)
            if isinstance(running, RunningSoftmaxMean):
                running.add_vectors(logit, own, seen)
            else:
                running.add(logit[:, None], counts=seen[:, None])
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
