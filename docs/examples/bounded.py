"""Averaging in which no client moves the global model further than a set length."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from polyfed.algorithms.algorithm import Cohort, Server, Weights, each
from polyfed.algorithms.fedavg import FedAvg


class Bounded(FedAvg):
    """Norm thresholding (Sun et al. 2019): an update w_k - W longer than ``length`` is cut to it, then averaged.

    The metric ``clipped`` is the share of the round's clients whose updates were too long.
    """

    length: float = Field(default=1.0, gt=0, description="largest L2 norm of a client's update")

    def round(self, server: Server, cohort: Cohort) -> None:
        """As FedAvg, of updates that are not too long."""
        means, cut = server.new_means(self.averaging, cohort), list[bool]()
        for reply in cohort.ask(self.fit, weights=each(server.weights_for)):
            means[reply.type].add(self.bounded(server.weights[reply.type], reply.weights, cut), reply.num_examples)
        server.update_weights(server.averaged(self.averaging, means))
        server.record(clipped=sum(cut) / max(len(cut), 1))

    def bounded(self, old: Mapping[str, Tensor], trained: Weights, cut: list[bool]) -> Weights:
        """Trained weights pulled back towards those that were sent; ``cut`` gets whether they were too far away."""
        new = {name: value.to(old[name]) for name, value in trained.items() if value.is_floating_point()}
        norm = float(torch.nn.utils.get_total_norm([new[name] - old[name] for name in new]))
        cut.append(norm > self.length)
        if norm <= self.length:
            return trained
        short = {name: old[name].lerp(value, self.length / norm) for name, value in new.items()}
        return Weights({**trained, **short})
