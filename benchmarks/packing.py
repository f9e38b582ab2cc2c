"""Clients in one batch against clients one after the other: CPU time of rounds of FedAvg, by size of model.

Limits: 0.3 of the loop at 10k weights, and with ``auto`` never above 1.05. A round is all of it: messages, drawing of
batches, training and averaging.
Both run the same rounds on the same federation in the same process, in turn; weights of both are compared.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import federations
import harness
import torch
from engine import in_memory, rounds_of

from polyfed.engines.local import LocalEngine
from polyfed.runs.session import Session

SIZES = {"1k": (1, 1), "10k": (12, 16), "40k": (48, 64), "300k": (300, 256), "1M": (700, 640)}
"""Name -> width of the hidden layer, and d; pictures have 768 values, and there are 10 classes."""
CLIENTS = (10, 100, 1000)
PACKS: tuple[Any, ...] = (128, "auto")
LIMITS = {"auto": 1.05}
AT_10K = 0.3
BATCH = 10


def crowd(clients: int, hidden: int, dim: int, optimizer: str, samples: int, epochs: int) -> dict[str, Any]:
    """FedAvg with all clients in every round, and no evaluation."""
    rate = {"sgd": {"lr": 0.05, "momentum": 0.9}}.get(optimizer, {"lr": 1e-3})
    client = {
        "count": clients,
        "source": "noise",
        "model": federations.image_model(dim, hidden),
        "task": "classification",
        "training": {"optimizer": {"kind": optimizer} | rate, "batch_size": BATCH},
    }
    return {
        "data": {"sources": {"noise": federations.Noise(count=clients * samples)}},
        "clients": {"client": client},
        "algorithm": {"name": "fedavg", "local_epochs": epochs},
        "run": {"rounds": 1000, "eval_every": 1000, "seed": 0, "threads": torch.get_num_threads(), "device": "cpu"},
    }


def engine(session: Session, pack: Any) -> LocalEngine:
    """The local engine of a session, packing."""
    return LocalEngine(federations.site_of(session), pack=pack)


def bench(name: str, clients: int, optimizer: str, arguments: argparse.Namespace) -> None:
    """One size of model and number of clients: the loop, and each way to pack."""
    content = crowd(clients, *SIZES[name], optimizer, arguments.samples, arguments.epochs)
    with federations.prepared(content) as session:
        loop = in_memory(session.loop())
        engines = {"loop": session.engine} | {f"pack_{pack}": engine(session, pack) for pack in PACKS}
        works, weights = {}, {}

        def work(key: str) -> Any:
            run = rounds_of(loop, 1)

            def go() -> None:
                loop.cohorts.engine = engines[key]
                run()
                weights[key] = {kind: dict(values) for kind, values in session.server.weights.items()}

            return go

        works = {key: work(key) for key in engines}
        times = harness.interleaved(works, arguments.repeats)
        memory = {key: harness.peak_extra(run) for key, run in works.items()}
        count = sum(value.numel() for value in next(iter(weights["loop"].values())).values())
        for key in list(engines)[1:]:
            limit = LIMITS.get(key.removeprefix("pack_"), AT_10K if name == "10k" else None)
            ratio = times[key].cpu / times["loop"].cpu
            harness.report(
                f"{name}_{clients}_{optimizer}_{key}",
                ratio=ratio,
                against="one client after the other, CPU time of a round (smaller is better)",
                limit=limit,
                within=None if limit is None else ratio <= limit,
                seconds=times[key].cpu,
                rival_seconds=times["loop"].cpu,
                parameters=count,
                steps_a_client=arguments.samples // BATCH * arguments.epochs,
                largest_difference=difference(weights["loop"], weights[key]),
                peak_extra_bytes=memory[key],
                rival_bytes=memory["loop"],
                threads=torch.get_num_threads(),
                load=round(os.getloadavg()[0], 1),
            )


def difference(one: Any, other: Any) -> float:
    """The largest between weights."""
    return max(float((one[kind][name] - other[kind][name]).abs().max()) for kind in one for name in one[kind])


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--clients", nargs="+", type=int, default=list(CLIENTS))
    parser.add_argument("--optimizers", nargs="+", default=["sgd"])
    parser.add_argument("--samples", type=int, default=50, help="of each client")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.sizes:
        for clients in arguments.clients:
            for optimizer in arguments.optimizers:
                bench(name, clients, optimizer, arguments)


if __name__ == "__main__":
    main()
