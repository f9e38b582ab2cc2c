"""Losses of two views of a batch, without labels: BYOL."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision


@in_full_precision
def byol(prediction: Float[Tensor, "b d"], target: Float[Tensor, "b d"]) -> Float[Tensor, ""]:
    """Mean over samples of 2 - 2 cos(prediction, target), from 0 to 4; gradient to the prediction only.

    Args:
        prediction: of the predictor, from the online network's projection of one view.
        target: the target network's projection of another view of the same samples.

    >>> x = torch.eye(2)
    >>> float(byol(x, 3 * x)), float(byol(x, -x))
    (0.0, 4.0)
    """
    return (2 - 2 * F.cosine_similarity(prediction, target.detach(), dim=1)).mean()


def symmetric_byol(
    predictions: tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]],
    targets: tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]],
) -> Float[Tensor, ""]:
    """``byol`` of each view's prediction with the other view's target, added; both arguments by view.

    >>> x = torch.eye(2)
    >>> float(symmetric_byol((x, x), (x, -x)))
    4.0
    """
    return byol(predictions[0], targets[1]) + byol(predictions[1], targets[0])


class Predictor(nn.Sequential):
    """Linear, batch norm, ReLU, linear: from projection to prediction, [b, d] to [b, d] with b > 1.

    The norm, which guards against collapse, has the batch's statistics at any time: predictors only ever train, and
    nothing but parameters is to be exchanged.

    >>> Predictor(dim=4, width=8)(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """

    def __init__(self, dim: int, width: int) -> None:
        norm = nn.BatchNorm1d(width, track_running_stats=False)
        super().__init__(nn.Linear(dim, width, bias=False), norm, nn.ReLU(), nn.Linear(width, dim))


class TargetNetwork(nn.ModuleDict):
    """The target network: a copy of online networks, by name, that learns nothing and follows them slowly.

    At each step it keeps the share ``momentum`` of itself: a higher one follows more slowly.

    >>> online = {"image": nn.Linear(1, 1, bias=False)}
    >>> target = TargetNetwork(online, momentum=0.9)
    >>> before, _ = float(target["image"].weight), online["image"].weight.data.add_(1.0)
    >>> target.follow()
    >>> round(float(target["image"].weight) - before, 3)
    0.1
    """

    def __init__(self, online: Mapping[str, nn.Module], momentum: float) -> None:
        super().__init__({name: copy.deepcopy(module) for name, module in online.items()})
        # in training mode, with statistics of the batch, as the online network
        self.requires_grad_(False).train()
        self._pace = 1 - momentum
        self._leaders = [value for module in online.values() for value in module.parameters()]

    @torch.no_grad()
    def follow(self) -> None:
        """xi <- momentum xi + (1 - momentum) theta, for parameters; buffers are its own."""
        # in the order of both, which a deep copy keeps
        for slow, fast in zip(self.parameters(), self._leaders, strict=True):
            slow.lerp_(fast, self._pace)
