"""Flower: its FedAvg over its simulation, whose only backend is Ray, with a process for each core."""

from __future__ import annotations

import os
import sys

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from problem import Problem, peak

problem, server, client, weights = Problem.read(), ServerApp(), ClientApp(), []


@client.train()
def train(message: Message, context: Context) -> Message:
    """A client's epochs, on data that its process reads once."""
    here, own = Problem.read(str(message.content["config"]["problem"])), int(context.node_config["partition-id"])
    network = here.network()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    here.train(network, own)
    examples = MetricRecord({"num-examples": len(here.y[own])})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": examples}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds."""
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=problem.clients)
    result = strategy.start(
        grid,
        ArrayRecord(problem.network().state_dict()),
        num_rounds=problem.rounds,
        train_config=ConfigRecord({"problem": sys.argv[1]}),
        evaluate_fn=lambda number, _: problem.clock.lap() if number else None,
    )
    weights.extend(value.numpy() for value in result.arrays.to_torch_state_dict().values())
    problem.peak = peak()


resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count()}}
run_simulation(server, client, problem.clients, backend_config=resources)
problem.finish(weights, "flwr")
