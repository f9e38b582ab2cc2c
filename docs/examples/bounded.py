"""Averaging in which no client moves the global model further than a set length."""

from __future__ import annotations

import torch
from pydantic import Field

from polyfed.algorithms.algorithm import Cohort, Reply, Server, Weights, each
from polyfed.algorithms.fedavg import FedAvg
from polyfed.wire.payload import Payload


class Bounded(FedAvg):
    """Norm thresholding (Sun et al. 2019): an update w_k - W longer than ``length`` is cut to it, then averaged.

    The metric ``clipped`` is the share of the round's clients whose updates were too long.
    """

    length: float = Field(default=1.0, gt=0, description="largest L2 norm of a client's update")

    def round(self, server: Server, cohort: Cohort) -> None:
        """As FedAvg, of updates that are not too long."""
        cut: list[bool] = []
        replies = cohort.ask(self.fit, check=server.weights_check(), weights=each(server.weights_for))
        self.average(server, cohort, (self.bounded(server, reply, cut) for reply in replies))
        server.record(clipped=sum(cut) / max(len(cut), 1))

    def bounded(self, server: Server, reply: Reply, cut: list[bool]) -> Reply:
        """A reply whose weights are pulled back towards those that were sent out; ``cut`` notes whether they were."""
        old = server.weights[server.type_of(reply.sender)]
        new = {name: value.to(old[name]) for name, value in reply.weights.items() if value.is_floating_point()}
        norm = float(torch.nn.utils.get_total_norm([new[name] - old[name] for name in new]))
        cut.append(norm > self.length)
        if norm <= self.length:
            return reply
        short = {name: old[name].lerp(value, self.length / norm) for name, value in new.items()}
        weights = Weights({**reply.weights, **short})
        return Reply.received(Payload({**reply.payload.fields, "weights": weights}), reply.sender)
