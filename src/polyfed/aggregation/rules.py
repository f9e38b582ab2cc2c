"""Robust rules: what stands for the replies of a type of clients of which some may be false."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.robust_rule import BufferingRule, RobustRule, squared_distances, stacked, weighted_sum


class Clip(RobustRule):
    """Each update scaled down to a multiple of the median norm of its type's last one, as it comes.

    Of weights, the change of each tensor from what the client was sent (Sun et al. 2019, "Can You Really Backdoor
    Federated Learning?"; Karimireddy et al., ICML 2021, whose centre is a momentum); of rows, each row. The median is
    that of the last round in which enough of the type replied; the first such round is buffered and has its own. It
    bounds what one client does and does not find out who it is: f clients still move a mean by f/n of the bound, every
    round.
    """

    short_name: ClassVar[str] = "clip"

    times: float = Field(default=1.0, gt=0, description="longest update, in medians")
    samples: Literal["claimed", "capped", "equal"] = Field(
        default="capped",
        description="what a client counts for in means by sample count: what it claims (within run.bounds.weight), at "
        "most the median of its type, or all of a type alike (the type's mean)",
    )


class Median(BufferingRule):
    """Coordinate-wise median of a type's clients (Yin et al., ICML 2018, Definition 1).

    Of an even number, the mean of the two in the middle. Each coordinate of the result lies between honest values as
    long as f < n / 2. What n clients send of one tensor is held and sorted at a time.
    """

    short_name: ClassVar[str] = "median"

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """The median of each coordinate; ``false`` says only how many clients there must be."""
        return [_median(tensors) for tensors in zip(*values, strict=True)]


def _median(tensors: Sequence[Tensor]) -> Tensor:
    ordered, n = stacked(tensors).sort(dim=0).values, len(tensors)
    return ordered[n // 2] if n % 2 else ordered[n // 2 - 1 : n // 2 + 1].mean(0)


class TrimmedMean(BufferingRule):
    """Coordinate-wise trimmed mean (Yin et al., ICML 2018, Definition 2).

    Of each coordinate the f largest and the f smallest values are left out, the others averaged. With f = 1 of 10 it is
    nearer to the mean than the median is; false clients beyond f move it as they move a mean.
    """

    short_name: ClassVar[str] = "trimmed_mean"

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        return [
            stacked(tensors).sort(dim=0).values[false : len(tensors) - false].mean(0)
            for tensors in zip(*values, strict=True)
        ]


class GeometricMedian(BufferingRule):
    """The point of least summed distance to the clients (RFA: Pillutla et al., IEEE TSP 2022, Algorithm 2).

    Smoothed Weiszfeld steps with equal weights of clients, over all tensors of a reply together, so that a client
    counts or does not as a whole. v = sum_k a_k x_k all the while, and |v - x_j|^2 = (D a)_j - a^T D a / 2 with the
    squared distances D between clients, so steps cost n^2, whatever the model.
    """

    short_name: ClassVar[str] = "geometric_median"

    steps: int = Field(default=100, ge=1, description="Weiszfeld steps at most; the paper finds 3 enough")
    smoothing: float = Field(
        default=1e-6, gt=0, lt=1, description="distances count as this share of the median one at least (nu)"
    )

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """The weighted sum at which the steps end."""
        return weighted_sum(values, self.weights(squared_distances(values)))

    def weights(self, squared: Float[Tensor, "n n"]) -> Float[Tensor, " n"]:
        """Weights a of the clients, of sum 1, from the squared distances between them."""
        n = len(squared)
        a = torch.full((n,), 1 / n, dtype=torch.float64)
        apart = squared[~torch.eye(n, dtype=torch.bool)]
        floor = self.smoothing * float(apart.median().sqrt()) if n > 1 else 0.0
        if not floor:
            floor = self.smoothing  # most clients are at one point, which is where the steps go
        for _ in range(self.steps):
            distances = (squared @ a - a @ squared @ a / 2).clamp_min(0).sqrt()
            new = 1 / distances.clamp_min(floor)
            new = new / new.sum()
            moved, a = float((new - a).abs().max()), new
            if moved < 1e-12:
                break
        return a


class Krum(BufferingRule):
    """The reply with the closest neighbours (Blanchard et al., NeurIPS 2017, section 4).

    A client's score is the sum of the squared distances to its n - f - 2 nearest others, over all tensors of a reply
    together; the one with the lowest score stands for all, bit for bit, of equal scores the first. So what the others
    have learnt is lost.
    """

    short_name: ClassVar[str] = "krum"

    factor: ClassVar[int] = 2
    beside: ClassVar[int] = 3

    def chosen(self, clients: int, false: int) -> int:
        return 1

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """The mean of the replies that are chosen."""
        order = scores(squared_distances(values), false).sort(stable=True).indices[: self.chosen(len(values), false)]
        weights = torch.zeros(len(values), dtype=torch.float64)
        weights[order] = 1 / len(order)
        return weighted_sum(values, weights)


def scores(squared: Float[Tensor, "n n"], false: int) -> Float[Tensor, " n"]:
    """Sums of the squared distances to the n - f - 2 nearest others."""
    nearest = squared.sort(dim=1).values[:, 1 : len(squared) - false - 1]  # the first is its own, 0
    return nearest.sum(1)


class MultiKrum(Krum):
    """The mean of the m replies with the lowest Krum scores (Blanchard et al., NeurIPS 2017, section 4)."""

    short_name: ClassVar[str] = "multi_krum"

    kept: int | None = Field(
        default=None, ge=1, description="m, at most n - f - 2 (El Mhamdi et al., ICML 2018); None: that many"
    )

    def required(self, false: int) -> int:
        """2 f + 3, and enough for m."""
        return max(super().required(false), (self.kept or 1) + false + 2)

    def chosen(self, clients: int, false: int) -> int:
        return clients - false - 2 if self.kept is None else self.kept


class Agreement(BufferingRule):
    """Rows of representations, logits or prototypes weighted by agreement with the median, sample by sample.

    The weight of client c on sample k is softmax over the clients of cos(r_ck, m_k) / tau with the coordinate-wise
    median m_k; rows longer than the median norm on a sample are shortened to it. Whoever is right about some samples
    and false about others counts for the former (polyfed's own).
    """

    short_name: ClassVar[str] = "agreement"

    rows_only: ClassVar[bool] = True

    tau: float = Field(
        default=0.1, gt=0, description="temperature: small ones listen to the nearest to the median alone"
    )

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        medians = Median().combined(values, false)
        return [self._mean(stacked(rows), m) for rows, m in zip(zip(*values, strict=True), medians, strict=True)]

    def _mean(self, rows: Float[Tensor, "n P d"], median: Float[Tensor, "P d"]) -> Float[Tensor, "P d"]:
        weights = (F.cosine_similarity(rows, median[None], dim=-1) / self.tau).softmax(0)
        norms = torch.linalg.vector_norm(rows, dim=-1)
        usual = norms.quantile(0.5, dim=0)
        factors = weights * (usual / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)
        mean: Tensor = (factors[..., None] * rows).sum(0)
        return mean
