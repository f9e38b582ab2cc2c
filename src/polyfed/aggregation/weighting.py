"""One interface for all ways to weigh clients' public-set uploads against each other, sample by sample."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.distinct import Distinct
from polyfed.aggregation.statistics import Statistic, Statistics, row_statistics, scores_statistics
from polyfed.aggregation.tiles import working_dtype
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings


@dataclass(frozen=True)
class Evidence:
    """One client's rows for one output on the public samples, beside the server's own outputs.

    An output is a modality (the client sends representations) or a target (it sends logits).
    """

    values: Float[Tensor, "n w"]
    """Representations of all public samples in order, or unnormalised class scores."""
    output: str
    """The modality, or the target."""
    server_outputs: Mapping[str, Float[Tensor, "n d"]]
    """The server's representations of the same samples by modality; empty for class scores."""
    examples: int
    """The client's private samples."""
    modalities: int
    """How many the client encodes."""
    labels: Int64[Tensor, " n"] | None = None
    """True classes, for class scores, where the public set has them."""
    items: Int64[Tensor, " n"] | None = None
    """Ascending number of the item behind each sample."""
    places: Mapping[str, Int64[Tensor, " _"]] = field(default_factory=dict)
    """Modality -> which of its distinct representations each sample has, where some repeat."""

    @property
    def is_scores(self) -> bool:
        """Whether ``values`` are class scores."""
        return not self.server_outputs

    def statistics(self, wanted: Collection[Statistic], *, tau: float = 1.0, mask_siblings: bool = False) -> Statistics:
        """Statistics of the cosines to the server's representations of this modality, or of the class scores.

        Args:
            wanted: which.
            tau: temperature, that cosines or scores are divided by.
            mask_siblings: whether samples of one item are no rivals of each other.

        Raises:
            ConfigError: the server has no representations of this modality, or a statistic of class scores needs
                labels and there are none.
        """
        if self.is_scores:
            return scores_statistics(self.values, wanted, labels=self.labels, tau=tau)
        return self.compared(self.output, wanted, tau=tau, mask_siblings=mask_siblings, cosines=True)

    def compared(
        self,
        modality: str,
        wanted: Collection[Statistic],
        *,
        tau: float,
        mask_siblings: bool = False,
        cosines: bool = False,
    ) -> Statistics:
        """Statistics of the products with the server's representations of a modality; arguments as ``statistics``.

        Each distinct row is compared with each distinct one; ``winner`` is one of these.

        Raises:
            ConfigError: the server has no representations of this modality.
        """
        if modality not in self.server_outputs:
            raise ConfigError(
                f"the server has no representations of '{modality}' to compare with; it has "
                f"{sorted(self.server_outputs)}"
            )
        own = Distinct.of(self.values, self.places.get(self.output))
        anchors = Distinct.of(self.server_outputs[modality], self.places.get(modality), self.siblings(mask_siblings))
        # rows come in 16 bits where the wire is, and cosines of these must not
        dtype = working_dtype(own.rows, anchors.rows)
        rows, others = (F.normalize(side.rows.to(dtype), dim=1) if cosines else side.rows for side in (own, anchors))
        return row_statistics(
            rows,
            others,
            wanted,
            of=own.places,
            own=anchors.places,
            tau=tau,
            items=anchors.items,
            counts=anchors.counts,
        )

    def siblings(self, masked: bool) -> Int64[Tensor, " n"] | None:
        """Item numbers if samples of one item are to be no rivals, else None.

        Raises:
            ConfigError: they are to be none, and the items are not known.
        """
        # a study may weigh without items; a run always knows them
        if masked and self.items is None:
            raise ConfigError("mask_siblings needs the items of the public samples; they are unknown here")
        return self.items if masked else None

    def truth(self) -> Int64[Tensor, " n"]:
        """What a right client ranks first: the sample's own representation, or the true class.

        Raises:
            ConfigError: class scores without labels.
        """
        if not self.is_scores:
            return Distinct.of(self.values, self.places.get(self.output)).places
        if self.labels is None:
            raise ConfigError(f"weights by the true classes of '{self.output}' need labels; the public set has none")
        return self.labels.to(self.values.device)


class Weighting(Settings):
    """A weight of each client on each public sample, before they are made to sum to 1 by ``Ensemble``.

    Subclasses live in ``polyfed.aggregation.weightings``.
    """

    home: ClassVar[str] = "polyfed.aggregation.weightings"
    needs_partner: ClassVar[bool] = False
    """Whether representations of a modality can only be weighed beside those of another one."""
    needs_labels: ClassVar[bool] = False
    """Whether class scores can only be weighed where the public set has labels."""

    @abstractmethod
    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"] | float:
        """Unnormalised log weight of the client, for each sample or one for all; -inf: it does not count.

        Raises:
            ConfigError: the evidence lacks what the weights come from (``needs_partner``, ``needs_labels``, items).
        """


def log_share(statistics: Statistics) -> Float[Tensor, " n"]:
    """x_kk - log sum_j exp x_kj over the own anchor and its rivals, from ``positive`` and ``negatives_lse``."""
    return statistics["positive"] - torch.logaddexp(statistics["positive"], statistics["negatives_lse"])


def log_count(examples: float) -> float:
    """log n; -inf, so that the client does not count, if it has no sample."""
    return math.log(examples) if examples > 0 else -math.inf
