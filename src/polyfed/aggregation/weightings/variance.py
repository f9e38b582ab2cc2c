"""Weights by the spread of scores."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from polyfed.aggregation.weighting import Evidence, Weighting


class Variance(Weighting):
    """Weighted consensus of FedET (Cho et al., IJCAI 2022): Var_j(x_kj), over classes.

    A client that tells classes apart spreads its scores. For representations x is the row of cosines to the server's
    representations of the same modality; that version is unpublished. Temperatures cancel.
    """

    compares: ClassVar[bool] = True

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """Log of the variance; -inf where all scores are equal."""
        return evidence.statistics({"variance"})["variance"].log()
