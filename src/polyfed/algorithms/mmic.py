"""MMiC."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.averaging import Averaging
from polyfed.aggregation.averagings.by_type import ByType
from polyfed.aggregation.coalitions import banzhaf, cluster_numbers, count_sketch, portfolio_cost
from polyfed.aggregation.mean import WeightedMean
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Cohort,
    LocalEpochs,
    LocalSteps,
    Reply,
    Server,
    WeightAveraging,
    Weights,
    client_step,
    each,
)
from polyfed.core.errors import PayloadError
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.optim.servers import Adagrad
from polyfed.tasks import evaluating
from polyfed.wire.payload import Payload

_SKETCHES, _LOSSES, _RETURNS, _POWER = "sketches", "losses", "returns", "power"
_MOST_INERTIA = 0.99
_LARGEST_LOSS = 1e6  # beyond it a fall of the loss is nobody's gain


class ClientChoice(Settings):
    """Clients of a cohort that take part, drawn within clusters by their Banzhaf power."""

    after: int = Field(default=5, ge=0, description="rounds in which all do, before anybody's power is known")
    share: float = Field(default=0.8, gt=0, le=1, description="of a cluster's clients in the cohort, one at least")


class Portfolio(Settings):
    """Inertia of the server by how risky, and how little rewarding, the clients' updates are."""

    risk: float = Field(default=0.5, ge=0, le=1, description="lambda, weight of the variance against the return")
    window: int = Field(default=3, ge=1, description="last returns of a client that covariances are of; 1: none")


class MMiC(Algorithm):
    """MMiC-like (Yang et al., CIKM 2025, arXiv 2505.06911): clusters make up for what clients lack.

    1. Clusters of each type, by likeness of the clients' first updates.
    2. Replacement: of a client whose samples have gaps, the layer that its training has changed most, relative to its
       weights, gives way to the mean of that layer over the cluster's clients of which it is not that layer.
    3. Choice: after some rounds, clients take part by their Banzhaf power in their cluster, with exp(2 power) as
       released. Power is of a game in which a client weighs samples x share of modalities present x its last return.
    4. Portfolio: the first moment of FedAdagrad decays by 0.9 + tanh(x) / 10, as released, x being Markowitz's cost of
       the cluster's updates, mean over clusters by samples; at most 0.99; returns are falls of clients' losses on
       their training samples.

    From the paper and its released code: the four parts and their order, exp(2 power), 0.9 + tanh(x) / 10, lambda,
    three returns, lr 0.1 and tau 0.001. Ours: clusters of updates, not of sketches of private data, which would have to
    leave clients; the change of a layer over a round beside the cluster's, not from batch to batch; an exact index;
    losses, where the code has test scores of clients; a covariance with its diagonal; and a first moment that decays,
    which the code's does not.
    """

    has_global_models: ClassVar[bool] = True
    compares_replies: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None
    averaging: WeightAveraging = ByType(server_optimizer=Adagrad(lr=0.1, tau=1e-3))
    clusters: int = Field(default=8, ge=1, description="most clusters of a type; released: 8 of 50 clients")
    sketch: int = Field(default=256, ge=8, description="width of the sketches of updates")
    replace: bool = Field(default=True, description="whether layers of clients with gaps are replaced")
    choice: ClientChoice | None = Field(default=ClientChoice(), description="null: all of the cohort take part")
    portfolio: Portfolio | None = Field(default=Portfolio(), description="null: the server optimizer as it is set")

    @model_validator(mode="after")
    def _has_a_first_moment(self) -> Self:
        optimizer = self.averaging.server_optimizer
        if self.portfolio is not None and not isinstance(optimizer, Adagrad):
            raise ValueError(
                f"portfolio sets beta1 of averaging.server_optimizer, and '{optimizer.component_name()}' has none; "
                "choose adagrad, adam or yogi, or set portfolio=null"
            )
        return self

    # ---- server half

    def setup(self, server: Server) -> None:
        server.share_weights(self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Choose, broadcast, train, replace layers, average with the inertia of the portfolio."""
        if self.choice is not None and server.clock.round > self.choice.after:
            cohort.keep(self.chosen(server, cohort.clients, self.choice))
        asked = cohort.clients
        # held, as a layer of one may be replaced by that of others
        replies = list(cohort.ask(self.fit, check=FiguresCheck(server), weights=each(server.weights_for)))
        self.note(server, replies)
        own = {reply.sender.id: reply for reply in replies}
        groups = [[own[one.id] for one in group] for group in self.groups(server, [one.sender for one in replies])]
        self.weigh(server, groups)
        averaging = self.averaging if self.portfolio is None else self.inert(server, groups, self.portfolio)
        server.average_weights(self.all_mended(server, groups), asked, averaging)

    def chosen(self, server: Server, clients: Sequence[ClientInfo], choice: ClientChoice) -> list[ClientInfo]:
        """Of each cluster's clients some, without replacement, with probabilities exp(2 power)."""
        power, ids = server.state.get(_POWER, {}), set[str]()
        stream = server.generator("choice")
        for group in self.groups(server, clients):
            usual = torch.tensor(1 / len(group), dtype=torch.float64)
            odds = torch.stack([power.get(client.id, usual).cpu() for client in group]).mul(2).exp()
            number = max(1, round(choice.share * len(group)))
            drawn = torch.multinomial(odds, number, generator=stream).tolist()
            ids |= {group[place].id for place in drawn}
        return [client for client in clients if client.id in ids]

    def groups(self, server: Server, clients: Sequence[ClientInfo]) -> list[list[ClientInfo]]:
        """Clients by type and cluster; those whose updates are not known yet, together."""
        known, groups = server.state.get(_SKETCHES, {}), dict[tuple[str, int], list[ClientInfo]]()
        for kind, members in server.types.items():
            ids = [member.id for member in members.clients if member.id in known]
            numbers = cluster_numbers(torch.stack([known[name].cpu() for name in ids]), self.clusters) if ids else []
            own = dict(zip(ids, numbers, strict=True))
            for client in (one for one in clients if server.type_of(one) == kind):
                groups.setdefault((kind, own.get(client.id, 0)), []).append(client)
        return list(groups.values())

    def note(self, server: Server, replies: Sequence[Reply]) -> None:
        """Keep sketches of clients' first updates, their losses, and their last returns."""
        kept = {name: dict(server.state.get(name, {})) for name in (_SKETCHES, _LOSSES, _RETURNS)}
        window = self.portfolio.window if self.portfolio else 1
        for reply in replies:
            name, loss = reply.sender.id, torch.tensor(reply.loss, dtype=torch.float64)
            if name not in kept[_SKETCHES]:
                change = changes_of(reply.weights, server.weights_for(reply.sender))
                stream = generator(server.clock.seed, "sketch", server.type_of(reply.sender))
                kept[_SKETCHES][name] = count_sketch(change, self.sketch, stream)
            gained = kept[_LOSSES].get(name, loss).cpu() - loss
            before = kept[_RETURNS].get(name, loss[None][:0]).cpu()
            kept[_RETURNS][name] = torch.cat([before, gained[None]])[-window:]
            kept[_LOSSES][name] = loss
        server.state.update(kept)

    def weigh(self, server: Server, groups: Sequence[Sequence[Reply]]) -> None:
        """Keep what power clients have in their clusters."""
        power = dict(server.state.get(_POWER, {}))
        for group in groups:
            gains = [max(0.0, float(server.state[_RETURNS][reply.sender.id][-1])) for reply in group]
            weights = [reply.num_examples * reply.complete * gain for reply, gain in zip(group, gains, strict=True)]
            index = banzhaf(torch.tensor(weights, dtype=torch.float64))
            power |= {reply.sender.id: own for reply, own in zip(group, index, strict=True)}
        server.state[_POWER] = power

    def all_mended(self, server: Server, groups: Sequence[Sequence[Reply]]) -> list[Reply]:
        """Replies of all clusters, mended if the method replaces layers."""
        mended = [reply for group in groups for reply in (self.mended(server, group) if self.replace else group)]
        given = [reply for group in groups for reply in group]
        replaced = sum(new is not old for new, old in zip(mended, given, strict=True))
        server.record(clusters=float(len(groups)), replaced=float(replaced))
        return mended

    def mended(self, server: Server, group: Sequence[Reply]) -> list[Reply]:
        """Replies of a cluster, with others' means in place of the poorest layers of those that have gaps."""
        poorest, mended = poorest_layers(server, group), []
        for reply, layer in zip(group, poorest, strict=True):
            mean, others = WeightedMean(), 0.0
            for other, own in zip(group, poorest, strict=True):
                if layer is not None and own != layer and other.num_examples:
                    mean.add({layer: other.weights[layer]}, float(other.num_examples))
                    others += other.num_examples
            if others and layer is not None:
                weights = Weights({**reply.weights, layer: mean.take()[layer]})
                reply = Reply.received(Payload({**reply.payload.fields, "weights": weights}), reply.sender)
            mended.append(reply)
        return mended

    def inert(self, server: Server, groups: Sequence[Sequence[Reply]], settings: Portfolio) -> Averaging:
        """The averaging whose server optimizer has beta1 = 0.9 + tanh(cost) / 10."""
        total, cost = 0.0, 0.0
        for group in groups:
            kept = [server.state[_RETURNS][reply.sender.id].cpu() for reply in group]
            rounds = min(map(len, kept))
            samples = torch.tensor([float(reply.num_examples) for reply in group], dtype=torch.float64)
            if float(samples.sum()) > 0:
                returns = torch.stack([one[-rounds:] for one in kept])
                size = float(samples.sum())
                cost, total = cost + size * portfolio_cost(returns, samples / size, settings.risk), total + size
        beta = min(_MOST_INERTIA, 0.9 + math.tanh(cost / max(total, 1.0)) / 10)
        server.record(inertia=beta)
        optimizer = self.averaging.server_optimizer.model_copy(update={"beta1": beta})
        return self.averaging.model_copy(update={"server_optimizer": optimizer})

    # ---- client half

    @client_step(weights=Weights, loss=float, complete=float, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model; send it, its loss on training samples, and what share of modalities these have."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        there = [float((client.train.rows[name] >= 0).double().mean()) for name in client.modalities]
        return Reply(
            weights=client.weights,
            loss=training_loss(client),
            complete=sum(there) / len(there),
            num_examples=client.num_examples,
        )


class FiguresCheck:
    """Raises PayloadError for a reply whose weights, loss or share of modalities no client can have."""

    def __init__(self, server: Server) -> None:
        self._weights = server.weights_check()

    def __call__(self, reply: Reply) -> None:
        self._weights(reply)
        if not 0 <= reply.complete <= 1:
            raise PayloadError(f"complete is {reply.complete:g}, a share of 0 to 1")
        if not abs(reply.loss) <= _LARGEST_LOSS:
            raise PayloadError(f"loss is {reply.loss:g}, expected {_LARGEST_LOSS:g} at most")


def training_loss(client: Client) -> float:
    """Mean loss of the client's training batches, the last of which may be short, in evaluation mode and view."""
    with evaluating(client.model):
        batches = (batch.to(client.device) for batch in client.train.batches(client.training.batch_size))
        return float(torch.stack([client.task_loss(batch).float() for batch in batches]).mean())


def changes_of(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Changes of floating tensors, on the device of the new ones."""
    return {
        name: value.float() - old[name].to(value.device).float()
        for name, value in new.items()
        if value.is_floating_point()
    }


def poorest_layers(server: Server, group: Sequence[Reply]) -> list[str | None]:
    """Of each client with gaps the matrix that has changed most beside its cluster's mean; None for the others."""
    rates = [relative_changes(reply, server) for reply in group]
    usual = {name: sum(own[name] for own in rates) / len(rates) for name in rates[0]}
    moved = [name for name, rate in usual.items() if rate > 0]

    def poorest(own: Mapping[str, float]) -> str | None:
        return max(moved, key=lambda name: own[name] / usual[name], default=None)

    return [poorest(own) if reply.complete < 1 else None for reply, own in zip(group, rates, strict=True)]


def relative_changes(reply: Reply, server: Server) -> dict[str, float]:
    """Mean change of each tensor of two dimensions or more, relative to the mean size of its entries before."""
    old = server.weights_for(reply.sender)
    changes = {name: change for name, change in changes_of(reply.weights, old).items() if change.ndim > 1}
    sizes = {name: float(old[name].float().abs().mean()) for name in changes}
    return {name: float(changes[name].abs().mean()) / size if size > 0 else 0.0 for name, size in sizes.items()}
