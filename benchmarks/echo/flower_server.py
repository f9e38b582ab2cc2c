"""The echo's ServerApp without polyfed, and its simulation.

python -m echo.flower_server OUT SCHEDULE CLIENTS PROCESSES
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import ServerApp

from echo import work
from echo.flower_client import client, decoded, encoded

POLL = 0.1  # seconds


def echo(grid: Any, schedule: Sequence[int], clients: int) -> list[work.Round]:
    """All rounds, as soon as all nodes are there."""
    nodes: list[int] = []
    while len(nodes) < clients:
        time.sleep(POLL)
        nodes = list(grid.get_node_ids())
    rounds = []
    for number, size in enumerate(schedule, 1):
        bank = work.bank(size, number)
        rounds.append(work.measured(size, lambda bank=bank: exchange(grid, nodes, bank)))
    return rounds


def exchange(grid: Any, nodes: Sequence[int], bank: work.Array) -> Iterator[work.Array]:
    """Push to all, pull as replies come, and hand them on in client order, in which sums have the same bits."""
    values = encoded(bank)
    facts = [ConfigRecord({"addend": work.addend(k)}) for k in range(len(nodes))]
    messages = [
        Message(RecordDict({"values": values, "facts": fact}), node, "train.echo")
        for fact, node in zip(facts, nodes, strict=True)
    ]
    order = list(grid.push_messages(messages))
    arrived: dict[str, Message] = {}
    while order:
        if order[0] in arrived:
            yield decoded(arrived.pop(order.pop(0)).content.array_records["values"])
            continue
        replies = list(grid.pull_messages([name for name in order if name not in arrived]))
        arrived |= {reply.metadata.reply_to_message_id: reply for reply in replies}
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"Flower reports: {reply.error.reason}")
        if not replies:
            time.sleep(POLL)


def server_app() -> ServerApp:
    """App for a deployment: the run configuration has the file for the measurements."""
    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Context) -> None:
        config = context.run_config
        sizes = [int(size) for size in str(config["schedule"]).split(",")]
        work.write_rounds(Path(str(config["out"])), echo(grid, sizes, int(str(config["clients"]))))

    return app


def simulate(schedule: Sequence[int], clients: int, processes: int) -> list[work.Round]:
    """In Flower's simulation, a virtual SuperNode for each client."""
    from flwr.simulation import run_simulation

    app, rounds = ServerApp(), []

    @app.main()
    def main(grid: Any, context: Context) -> None:
        rounds.extend(echo(grid, schedule, clients))

    run_simulation(
        server_app=app,
        client_app=client,
        num_supernodes=clients,
        backend_config={
            "init_args": {"num_cpus": processes, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return rounds


def run(out: str, schedule: str, clients: str, processes: str) -> None:
    """Measure the simulation."""
    sizes = [int(size) for size in schedule.split(",")]
    work.write_rounds(Path(out), simulate(sizes, int(clients), int(processes)))


if __name__ == "__main__":
    run(*sys.argv[1:])
