"""Flower's simulation: a strategy, a client app, Ray actors of one CPU each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from problem import Problem
from torch.nn import functional as F

arguments = list(sys.argv)
problem = Problem.read()
client_app, server_app = ClientApp(), ServerApp()
kept: dict[str, Problem] = {}


def here() -> Problem:
    """The problem, read once in each process."""
    if "problem" not in kept:
        sys.argv = arguments
        kept["problem"] = Problem.read()
    return kept["problem"]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """A client's round."""
    own, client = here(), int(context.node_config["partition-id"])
    model = own.network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=own.rate, fused=True)
    x, y = torch.from_numpy(own.x[client]), torch.from_numpy(own.y[client])
    for _ in range(own.epochs):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    """FedAvg that tells the clock."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple:
        """As FedAvg."""
        found = super().aggregate_train(server_round, replies)
        problem.clock.lap()
        return found


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """All rounds."""
    strategy = Timed(fraction_evaluate=0.0, min_available_nodes=problem.clients)
    start = ArrayRecord(problem.network().state_dict())
    result = strategy.start(grid, start, num_rounds=problem.rounds)
    problem.finish([value.numpy() for value in result.arrays.to_torch_state_dict().values()], "flwr", "ray")


resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}}
run_simulation(server_app, client_app, num_supernodes=problem.clients, backend_config=resources)
