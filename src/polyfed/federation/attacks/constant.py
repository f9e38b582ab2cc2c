"""One value for all."""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.federation.attack import FalseUpdate


class Constant(FalseUpdate):
    """The same for everything: each row is the first; an update of weights has one value, as long as it was.

    (Same-value attack of Li et al., RSA, AAAI 2019; of representations, a collapsed encoder.)
    """

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        """The first row for all; of one row, its root mean square."""
        if len(rows) > 1:
            return rows[:1].expand_as(rows).clone()
        return torch.full_like(rows, float(rows.double().square().mean().sqrt()))
