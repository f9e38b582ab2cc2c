"""Limits on what false clients can do to an average: norm clipping of each update, and robust rules for a minority."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import floor
from statistics import median
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import AfterValidator, Field
from torch import Tensor

from polyfed.aggregation.mean import accumulator
from polyfed.core.settings import Settings
from polyfed.wire.payload import TensorBundle, grouped

# ---- norm clipping


ENOUGH = 3
"""Fewest clients for a median: of fewer, one alone could move it."""


class Clipping(Settings):
    """Largest norm of an update, in medians of the norms of the last ask of its step, by field and architecture.

    Norm clipping of updates (Sun et al. 2019, "Can You Really Backdoor Federated Learning?") with a multiple of a
    median in place of a constant: it needs no tuning, and no reply waits. The first ask is unbounded. The norm is one
    of all floating tensors of a field: of the change of weights, of the values of others.
    """

    times: float = Field(
        default=4.0,
        gt=0,
        allow_inf_nan=False,
        description="longest update, in medians; longer ones are scaled down to it",
    )
    weight: float | None = Field(
        default=None,
        ge=1,
        allow_inf_nan=False,
        description="samples that a client counts for at most in an average, in medians of its peers; None: all",
    )


def median_norm(norms: Iterable[float]) -> float | None:
    """The median; None for too few norms, or where most are 0."""
    known = list(norms)
    return (median(known) or None) if len(known) >= ENOUGH else None


@torch.no_grad()
def update_norm(bundle: TensorBundle, start: Mapping[str, Tensor]) -> float:
    """L2 norm of the change of all floating tensors from ``start``; tensors missing there start from 0."""
    floating = {name: value for name, value in bundle.items() if value.is_floating_point()}
    norms = dict[str, Tensor]()
    for names in grouped(floating):
        changes = [_exact(floating[name]) for name in names]
        if start:
            zero = changes[0].new_zeros(())  # where a tensor that is not in ``start`` begins
            changes = [*torch._foreach_sub(changes, [start.get(name, zero).to(changes[0]) for name in names])]
        norms |= zip(names, torch._foreach_norm(changes), strict=True)
    return float(torch.stack([norms[name].float() for name in floating]).norm()) if norms else 0.0


@torch.no_grad()
def scaled(bundle: TensorBundle, start: Mapping[str, Tensor], factor: float) -> TensorBundle:
    """The bundle with ``factor`` times its change from ``start``; integer tensors stay as they are."""
    tensors = dict(bundle)
    for name, value in bundle.items():
        if value.is_floating_point():
            exact = _exact(value)
            origin = start[name].to(exact) if name in start else torch.zeros_like(exact)
            tensors[name] = torch.lerp(origin, exact, factor).to(value.dtype)
    return type(bundle)(tensors=tensors, **bundle.attributes())


def _exact(value: Tensor) -> Tensor:
    """The value in at least fp32: squares of float16 overflow from 256 on."""
    return value.to(accumulator(value.dtype))


# ---- robust rules


def _share(value: int | float) -> int | float:
    if isinstance(value, float) and not 0 < value < 0.5:
        raise ValueError("tolerated is a share of a type's clients (above 0, below 0.5) or a number (an integer)")
    if isinstance(value, int) and value < 1:
        raise ValueError("tolerated is 0, which is the mean of the method itself; leave aggregation.robust out")
    return value


class RobustRule(Settings):
    """Combination of the replies of clients of one type (one architecture, task and classes) in a round.

    A rule receives all replies of a type before it combines them. It counts clients alike, whatever number of samples
    they claim: its guarantee is about numbers of clients.
    """

    home: ClassVar[str] = "polyfed.privacy.rules"
    factor: ClassVar[int] = 2
    """With f false clients the rule needs ``factor`` f + ``margin`` replies of a type."""
    margin: ClassVar[int] = 1

    tolerated: Annotated[int | float, AfterValidator(_share)] = Field(
        default=0.2,
        description="false clients of each type in a round, f: a number, or a share (rounded down, at least one)",
    )

    def false_clients(self, asked: int) -> int:
        # 0.3 of 10 is 3, although the product may be a bit less
        return self.tolerated if isinstance(self.tolerated, int) else max(1, floor(self.tolerated * asked + 1e-9))

    def required(self, false: int) -> int:
        """Replies of a type without which ``false`` of them could decide."""
        return self.factor * false + self.margin

    @abstractmethod
    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """One tensor in place of the clients' tensors, for each, in its shape.

        Args:
            values: Tensors of each client, the same ones in the same order, in fp32 or fp64.
            false: Number f of false clients; there are at least ``required(f)`` clients.
        """


def stacked(values: Sequence[Tensor]) -> Float[Tensor, "n ..."]:
    return torch.stack([value.to(values[0]) for value in values])


def squared_distances(values: Sequence[Sequence[Tensor]]) -> Float[Tensor, "n n"]:
    """Squared Euclidean distances between clients, over all their tensors together, fp64 on the CPU.

    Computed from differences, as products would lose the digits of small updates of long weights.
    """
    total = torch.zeros(len(values), len(values), dtype=torch.float64)
    for tensors in zip(*values, strict=True):
        table = stacked(tensors).flatten(1)
        for k in range(len(table) - 1):
            lengths = torch.linalg.vector_norm(table[k + 1 :] - table[k], dim=1, dtype=torch.float64).cpu()
            total[k, k + 1 :] += lengths.square()
    return total + total.T


def weighted_sum(values: Sequence[Sequence[Tensor]], weights: Float[Tensor, " n"]) -> list[Tensor]:
    """sum_k a_k x_k tensor by tensor, for weights that sum to 1; clients of weight 0 are not read."""
    counted = [(client, float(weight)) for client, weight in zip(values, weights, strict=True) if weight > 0]
    if len(counted) == 1:
        return list(counted[0][0])  # bit for bit
    shares = torch.tensor([weight for _, weight in counted], dtype=torch.float64)
    result = []
    for tensors in zip(*(client for client, _ in counted), strict=True):
        # differences from the first: equal inputs come out bit for bit
        changes = stacked(tensors) - tensors[0]
        result.append(tensors[0] + torch.tensordot(shares.to(changes), changes, dims=1))
    return result


class Median(RobustRule):
    """Coordinate-wise median of a type's clients (Yin et al., ICML 2018, Definition 1).

    For an even number of clients, the mean of the two middle values. Each coordinate of the result lies between honest
    values as long as f < n / 2. The values of one tensor of all n clients are held and sorted at a time.
    """

    short_name: ClassVar[str] = "median"

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """The median of each coordinate; ``false`` is not used."""
        return [_median(tensors) for tensors in zip(*values, strict=True)]


def _median(tensors: Sequence[Tensor]) -> Tensor:
    ordered, n = stacked(tensors).sort(dim=0).values, len(tensors)
    return ordered[n // 2] if n % 2 else ordered[n // 2 - 1 : n // 2 + 1].mean(0)


class TrimmedMean(RobustRule):
    """Coordinate-wise trimmed mean (Yin et al., ICML 2018, Definition 2).

    The f largest and the f smallest values of each coordinate are left out, the others averaged. With f = 1 of 10 it
    is nearer to the mean than the median is; false clients beyond f move it as they move a mean.
    """

    short_name: ClassVar[str] = "trimmed_mean"

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        return [stacked(own).sort(dim=0).values[false : len(own) - false].mean(0) for own in zip(*values, strict=True)]


_SMOOTHING = 1e-6  # nu: distances count as this share of the median one at least


class GeometricMedian(RobustRule):
    """The point of least summed distance to the clients (RFA: Pillutla et al., IEEE TSP 2022, Algorithm 2).

    Smoothed Weiszfeld steps with equal weights of clients, over all tensors of a reply together, so that a client
    counts as one or not at all. v = sum_k a_k x_k throughout, and |v - x_j|^2 = (D a)_j - a^T D a / 2 with the squared
    distances D between clients, so a step costs n^2, whatever the model.
    """

    short_name: ClassVar[str] = "geometric_median"

    steps: int = Field(default=100, ge=1, description="Weiszfeld steps at most; the paper finds 3 enough")

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """The weighted sum at which the steps end."""
        return weighted_sum(values, self.weights(squared_distances(values)))

    def weights(self, squared: Float[Tensor, "n n"]) -> Float[Tensor, " n"]:
        """Weights a of the clients, of sum 1, from the squared distances between them."""
        n = len(squared)
        a = torch.full((n,), 1 / n, dtype=torch.float64)
        floor = _SMOOTHING * float(squared[~torch.eye(n, dtype=torch.bool)].median().sqrt()) if n > 1 else 0.0
        floor = floor or _SMOOTHING  # 0 where most clients are at one point, which is where the steps go
        for _ in range(self.steps):
            new = 1 / (squared @ a - a @ squared @ a / 2).clamp_min(0).sqrt().clamp_min(floor)
            new = new / new.sum()
            moved, a = float((new - a).abs().max()), new
            if moved < 1e-12:
                break
        return a


class Krum(RobustRule):
    """The reply with the closest neighbours (Blanchard et al., NeurIPS 2017, section 4).

    A client's score is the sum of the squared distances to its n - f - 2 nearest others, over all tensors of a reply
    together; the reply with the lowest score, the first of equals, replaces all others bit for bit. Their training is
    lost.
    """

    short_name: ClassVar[str] = "krum"
    margin: ClassVar[int] = 3

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
    """The mean of the n - f - 2 replies with the lowest Krum scores (Blanchard et al. 2017; El Mhamdi et al. 2018)."""

    short_name: ClassVar[str] = "multi_krum"

    def chosen(self, clients: int, false: int) -> int:
        return clients - false - 2
