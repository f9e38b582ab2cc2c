"""One interface for all robust rules: what stands for the replies of clients of one type if some of them are false."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import floor
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import AfterValidator, Field, SerializeAsAny
from torch import Tensor

from polyfed.core.settings import Settings
from polyfed.privacy.secure_sum import SecureSum


def _share(value: int | float) -> int | float:
    if isinstance(value, float) and not 0 < value < 0.5:
        raise ValueError("tolerated is a share of a type's clients (above 0, below 0.5) or a number of them (whole)")
    if isinstance(value, int) and value < 1:
        raise ValueError("tolerated is 0, which is the mean of the method itself; leave aggregation.robust out")
    return value


class RobustRule(Settings):
    """What becomes of the replies of clients of one type (one architecture, task and classes) in a round.

    Every rule counts clients alike, whatever number of samples they claim: its guarantee is about numbers of clients.
    Subclasses live in ``polyfed.aggregation.rules``; they combine buffered replies (``BufferingRule``) or
    change each as it comes.
    """

    home: ClassVar[str] = "polyfed.aggregation.rules"
    factor: ClassVar[int] = 2
    """With f false clients the rule needs ``factor`` f + ``beside`` replies of a type."""
    beside: ClassVar[int] = 1
    rows_only: ClassVar[bool] = False
    """Whether only rows that belong to public samples or classes can be combined, no weights."""

    tolerated: Annotated[int | float, AfterValidator(_share)] = Field(
        default=0.2,
        description="false clients of each type in a round, f: a number, or a share (rounded down, at least one)",
    )

    def false_clients(self, asked: int) -> int:
        # 0.3 of 10 is 3, although the product may be a bit less
        return self.tolerated if isinstance(self.tolerated, int) else max(1, floor(self.tolerated * asked + 1e-9))

    def required(self, false: int) -> int:
        """Replies of a type without which ``false`` of them could decide."""
        return self.factor * false + self.beside


class BufferingRule(RobustRule):
    """A rule that must see all replies of a type before it knows what stands for them."""

    @abstractmethod
    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """What stands for clients' tensors.

        Args:
            values: of each client, the same tensors in the same order, in fp32 or fp64.
            false: f, of at least ``required(f)`` clients.

        Returns:
            One tensor for each, in its shape.
        """


class AggregationSettings(Settings):
    """How replies are combined, whatever the method then does with them."""

    robust: SerializeAsAny[RobustRule] | None = Field(
        default=None,
        description="what a minority of false clients cannot move far: clip, median, trimmed_mean, geometric_median, "
        "krum, multi_krum, agreement; None: replies count as they are, within run.bounds",
    )
    secure: SerializeAsAny[SecureSum] | None = Field(
        default=None,
        description="sums of which the server sees nothing but the result: pairwise_masks, or unmasked to compare "
        "with; None: it sees every reply",
    )


def stacked(values: Sequence[Tensor]) -> Float[Tensor, "n ..."]:
    return torch.stack([value.to(values[0]) for value in values])


def squared_distances(values: Sequence[Sequence[Tensor]]) -> Float[Tensor, "n n"]:
    """Squared Euclidean distances between clients, over all their tensors together, fp64 on the CPU.

    From differences and not from products, which would lose the digits of small updates of long weights.
    """
    total = torch.zeros(len(values), len(values), dtype=torch.float64)
    for tensors in zip(*values, strict=True):
        table = stacked(tensors).flatten(1)
        for k in range(len(table) - 1):
            lengths = torch.linalg.vector_norm(table[k + 1 :] - table[k], dim=1, dtype=torch.float64).cpu()
            total[k, k + 1 :] += lengths.square()
    return total + total.T


def weighted_sum(values: Sequence[Sequence[Tensor]], weights: Float[Tensor, " n"]) -> list[Tensor]:
    """sum_k a_k x_k tensor by tensor, for weights that sum to 1; clients of weight 0 are not looked at."""
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
