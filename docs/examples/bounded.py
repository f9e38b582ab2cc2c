"""Averaging in which no client moves the global model further than a set length."""

import torch
from pydantic import Field

from polyfed.algorithms.algorithm import Cohort, Server, Weights, each
from polyfed.algorithms.fedavg import FedAvg


class Bounded(FedAvg):
    """Norm thresholding (Sun et al. 2019): an update w_k - W longer than ``length`` is cut to it, then averaged.

    The metric ``clipped`` is the share of the round's clients whose updates were too long.
    """

    # settings, in addition to those of FedAvg: polyfed run experiment.yaml --set algorithm.length=1
    length: float = Field(default=1.0, gt=0, description="largest L2 norm of a client's update")

    # server half; the client half is FedAvg's `fit`: to change the loss, the gradients or the reply, override it here
    def round(self, server: Server, cohort: Cohort) -> None:
        """FedAvg of updates that are not too long."""
        means, cut = server.new_means(self.averaging, cohort), list[bool]()
        for reply in cohort.ask(self.fit, weights=each(server.weights_for)):
            # one reply at a time: change here what becomes of it, and of its weight in the mean
            bounded, is_cut = self.bounded(server.weights_for(reply.sender), reply.weights)
            means[reply.type].add(bounded, reply.num_examples)
            cut.append(is_cut)
        # the new global model of each type of clients: change here what the server makes of the mean
        server.update_weights(server.averaged(self.averaging, means))
        server.record(clipped=sum(cut) / max(len(cut), 1))  # a metric of the run

    def bounded(self, old: Weights, new: Weights) -> tuple[Weights, bool]:
        """Trained weights pulled back towards those that were sent; True if they were too far away.

        Running means of a batch norm, which are not trained, stay as they are.
        """
        trained = [name for name in new if new[name].is_floating_point() and "running_" not in name]
        moved = {name: new[name].to(old[name]) for name in trained}
        norm = float(torch.nn.utils.get_total_norm([value - old[name] for name, value in moved.items()]))
        if norm <= self.length:
            return new, False
        short = {name: old[name].lerp(value, self.length / norm) for name, value in moved.items()}
        return Weights({**new, **short}), True
