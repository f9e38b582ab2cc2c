"""Attention of a student over teachers (FedMKD, NeurIPS 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn


class TeacherAttention(nn.Module):
    """One target a sample out of what several teachers say of it: sum_c softmax_c(q . k_c / sqrt(outputs)) t_c.

    The query q comes from what the student says of the sample, the key k_c from what teacher c does, both through the
    channel's adapter, an MLP with few outputs. The paper names an MLP to 10 scores and a softmax over teachers; that
    query and keys share it, and the scale, are inferred.

    Args:
        widths: name of an output -> its width w.
        outputs: of the adapters.
    """

    def __init__(self, widths: Mapping[str, int], outputs: int = 10) -> None:
        super().__init__()
        self._place = {channel: place for place, channel in enumerate(widths)}
        self._scale = 1 / math.sqrt(outputs)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)) for width in widths.values()
        )

    def forward(
        self, channel: str, student: Float[Tensor, "b w"], teachers: Float[Tensor, "t b w"]
    ) -> tuple[Float[Tensor, "b w"], Float[Tensor, "t b"]]:
        """The targets, and the weight of each teacher; both carry gradient to the adapter.

        Args:
            channel: whose adapter.
            student: what the student says; a constant, as it is not to learn to choose easy teachers.
            teachers: what the teachers say.
        """
        adapter = self.adapters[self._place[channel]]
        weights = (self._scale * (adapter(student.detach()) * adapter(teachers)).sum(-1)).softmax(0)
        return torch.einsum("tb,tbw->bw", weights, teachers), weights
