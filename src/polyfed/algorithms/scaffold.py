"""SCAFFOLD."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.mean import WeightedMean
from polyfed.algorithms.algorithm import Client, ClientInfo, Cohort, Lifetime, Reply, Server, Weights, client_step, each
from polyfed.algorithms.fedavg import FedAvg

Tensors = Mapping[str, Tensor]
_ZERO = Weights({})


class Scaffold(FedAvg):
    """Stochastic controlled averaging (Karimireddy et al., ICML 2020, Algorithm 1).

    The server keeps a control variate c for each type of clients, every client one of its own, c_k; all start at
    zero. Local gradients are corrected by c - c_k, which takes out what is peculiar to a client's data.

    The new c_k is the mean of the raw gradients g_1 ... g_K along the local path. For plain SGD that is the paper's
    option II: the path is w_k = W - eta sum_j (g_j + c - c_k), so that

        (W - w_k) / (K eta) - c + c_k = sum_j g_j / K.

    Unlike the left side, the right one means the same with momentum, adaptive steps, clipping and learning rates that
    change.

    The server's learning rate is that of ``averaging.server_optimizer``. Weights are averaged by sample count, as
    FedAvg does; but it is c that decides whose optimum is a fixed point, see ``objective``.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"control": Lifetime.RUN}

    takes_late_replies: ClassVar[bool] = False

    objective: Literal["clients", "samples"] = Field(
        default="clients", description="c is the mean of all c_k: by clients, as in the paper, or by their samples"
    )

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast W and c, train, average both."""
        means, changes = server.new_means(self.averaging, cohort), {name: WeightedMean() for name in server.types}
        for reply in cohort.ask(  # lines 5 to 15
            self.fit,
            changes={"controls": each(server.weights_for)},
            weights=each(server.weights_for),
            controls=each(lambda client: self.control_for(server, client)),
        ):
            means[reply.type].add(reply.weights, reply.num_examples)  # line 16
            changes[reply.type].add(reply.controls, self.share(server, reply.sender))
        server.update_weights(server.averaged(self.averaging, means))  # line 17, the model
        # c <- c + |S| / N mean of the changes (Algorithm 1, line 17): absent clients keep their c_k
        for name, mean in changes.items():
            if mean.total > 0:
                part = mean.total / sum(self.share(server, client) for client in server.types[name].clients)
                server.state[_key(name)] = _moved(server.state.get(_key(name), {}), mean.take(), part)

    def share(self, server: Server, client: ClientInfo) -> float:
        return 1.0 if self.objective == "clients" else float(server.weight(client))

    def control_for(self, server: Server, client: ClientInfo) -> Weights:
        """The control variate of a client's type; empty while it is zero."""
        return Weights(server.state.get(_key(server.type_of(client)), {}))

    # ---- client half

    @client_step(weights=Weights, controls=Weights, num_examples=int, name="controlled_fit")
    def fit(self, client: Client, weights: Weights, controls: Weights = _ZERO) -> Reply:
        """Train the received model with corrected gradients; send it, and the change of c_k."""
        client.load_weights(weights)  # line 7
        own, common = _filled(client, client.state.get("control", {})), _filled(client, controls)
        sums = {name: torch.zeros_like(value) for name, value in own.items()}
        shift = {name: common[name] - value for name, value in own.items()}
        correct = partial(shift_gradients, shift=shift, sums=sums)
        # lines 8 to 11
        steps = client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, correct=correct)
        new = {name: total / max(steps, 1) for name, total in sums.items()}  # line 12, option II
        client.state["control"] = new  # line 14
        return Reply(
            weights=client.weights,
            controls=Weights({name: new[name] - own[name] for name in new}),
            num_examples=client.num_examples,
        )


def shift_gradients(gradients: Tensors, weights: Tensors, *, shift: Tensors, sums: Tensors) -> None:
    """Add the raw gradients to ``sums``, and then c - c_k to them, all in place."""
    for name, gradient in gradients.items():
        sums[name].add_(gradient)  # before the shift, which would cancel from the estimate of c_k
        gradient.add_(shift[name])


def _filled(client: Client, values: Tensors) -> dict[str, Tensor]:
    """A value for every trained parameter, on the client's device: 0 for those that are not known."""
    return {
        name: values[name].to(client.device) if name in values else torch.zeros_like(value)
        for name, value in client.model.trained().items()
    }


def _moved(old: Tensors, change: Tensors, part: float) -> dict[str, Tensor]:
    moved = {name: value * part for name, value in change.items()}
    return dict(old) | {name: value + old[name].to(value) if name in old else value for name, value in moved.items()}


def _key(type_name: str) -> str:
    return f"control:{type_name}"
