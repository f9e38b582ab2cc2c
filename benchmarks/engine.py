"""The local engine: its rounds against a plain PyTorch loop, and its memory against the number of clients.

Limits: FedAvg in at most 1.05 x the time of a plain loop with the same arithmetic in the same run, to the same
bits; resident memory that grows by at most 10 kB a client, each of which keeps a model and an optimiser.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import federations
import harness
import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.randomness import generator
from polyfed.data.images import normalised
from polyfed.runs.loop import Loop
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger

TIME_LIMIT = 1.05
GROWTH_LIMIT = 10.0
CLIENTS, COHORT, SAMPLES, BATCH, LR = 100, 20, 50, 10, 0.05
SEED = 0
GROUP = "client"
RESNET = {  # tiny, with 0.9 million parameters
    "dim": 256,
    "encoders": {"image": {"name": "resnet", "widths": [28, 56, 112, 208], "view": {"name": "pixels", "size": 16}}},
}

# ---- FedAvg


class InMemory(Loop):
    """Leaves nothing on disk."""

    def save(self, number: int, ledger: Ledger, seconds: float | None) -> None:
        """Forget the round."""
        self.recorder.take()


def in_memory(loop: Loop) -> Loop:
    """The loop without a run folder."""
    return InMemory(**vars(loop))


def fedavg(model: dict[str, Any], device: str = "cpu", batch: int = BATCH) -> dict[str, Any]:
    """Settings of a run without evaluation in the rounds that are timed."""
    training = {"optimizer": {"kind": "sgd", "lr": LR, "momentum": 0.0}, "batch_size": batch}
    group = {
        "count": CLIENTS,
        "source": "noise",
        "model": model,
        "task": "classification",
        "training": training,
    }
    threads = torch.get_num_threads()
    return {
        "data": {"sources": {"noise": federations.Noise(count=CLIENTS * SAMPLES)}},
        "clients": {GROUP: group},
        "algorithm": {"name": "fedavg", "local_epochs": 1},
        "run": {
            "rounds": 1000,
            "eval_every": 1000,
            "seed": SEED,
            "threads": threads,
            "device": device,
            "sampling": {"cohort": COHORT},
        },
    }


class PlainLoop:
    """FedAvg as one would write it for this one case: one model, no messages, no checks, nothing kept."""

    def __init__(self, session: Session, batch: int = BATCH, precision: torch.dtype = torch.float32) -> None:
        federation, device = session.federation, session.experiment.run.device
        self.device, self.batch, self.precision = torch.device(device), batch, precision
        members = federation.members.values()
        self.ids = [member.id for member in members]
        self.samples = [federation.train(member) for member in members]
        self.pictures: np.ndarray = self.samples[0].inputs["image"].pictures  # type: ignore[attr-defined]
        self.model = federation.client_model(next(iter(members))).to(self.device)
        (self.head,) = self.model.heads.values()
        self.live = list(self.model.state_dict().values())  # counters of batches are equal for all clients
        self.floating = [k for k, value in enumerate(self.live) if value.is_floating_point()]
        self.start = [value.clone() for value in self.live]
        self.weights = self.start

    def run(self, rounds: int) -> None:
        """So many rounds from the initial weights."""
        self.weights = [value.clone() for value in self.start]
        for number in range(1, rounds + 1):
            self.round(number)

    def round(self, number: int) -> None:
        """Broadcast, train, average."""
        order = torch.randperm(CLIENTS, generator=generator(SEED, number, "cohort"))
        current = [self.live[k] for k in self.floating]
        mean: list[Tensor] = []
        total = 0
        for client in sorted(order[:COHORT].tolist()):
            self.train(client, number)
            examples = len(self.samples[client])
            total += examples
            if mean:
                torch._foreach_lerp_(mean, current, examples / total)
            else:
                mean = [value.clone() for value in current]
        self.weights = [value.clone() for value in self.live]
        for k, value in zip(self.floating, mean, strict=True):
            self.weights[k] = value

    def train(self, client: int, number: int) -> None:
        """One epoch on a client's samples."""
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.weights)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        samples = self.samples[client]
        rows, labels = samples.rows["image"], samples.targets["label"]
        draw = generator(SEED, number, self.ids[client], "task-0")
        encoder: nn.Module = self.model.encoders["image"]
        self.model.train()
        for index in torch.randperm(len(rows), generator=draw).split(self.batch):
            x = normalised(torch.from_numpy(self.pictures[rows[index].numpy()]).to(self.device), "half")
            wanted = labels[index].to(self.device)
            with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                loss = F.cross_entropy(self.head(encoder(x)), wanted)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()


def rounds_of(loop: Loop, rounds: int) -> Callable[[], None]:
    """So many rounds from the initial weights."""

    def work() -> None:
        loop.experiment.algorithm.setup(loop.server)
        for number in range(1, rounds + 1):
            loop.round(number)

    return work


def bench_fedavg(name: str, model: dict[str, Any], rounds: int, repeats: int) -> None:
    """Rounds of FedAvg with and without run folder against the plain loop."""
    content = fedavg(model)
    with federations.prepared(content) as bare, federations.prepared(content) as durable:
        plain = PlainLoop(bare)
        works: dict[str, harness.Work] = {
            "in memory": rounds_of(in_memory(bare.loop()), rounds),
            "plain": lambda: plain.run(rounds),
            "with its run folder": rounds_of(durable.loop(), rounds),
        }
        times = harness.interleaved(works, repeats)
        memory = {key: harness.peak_extra(work) for key, work in works.items()}
        for key, session in (("in memory", bare), ("with its run folder", durable)):
            ratio = times[key].wall / times["plain"].wall
            harness.report(
                f"FedAvg, {name}, {key}: a round",
                ratio=ratio,
                against="a plain PyTorch loop, wall time",
                limit=TIME_LIMIT,
                cpu_ratio=times[key].cpu / times["plain"].cpu,
                seconds_a_round=times[key].wall / rounds,
                rival_seconds_a_round=times["plain"].wall / rounds,
                overhead_ms_a_client=1e3 * (times[key].cpu - times["plain"].cpu) / rounds / COHORT,
                identical_bits=identical(session, plain),
                parameters=sum(value.numel() for value in plain.live),
                clients=CLIENTS,
                cohort=COHORT,
                samples=SAMPLES,
                batch=BATCH,
                peak_extra_bytes=memory[key],
                rival_bytes=memory["plain"],
                **harness.conditions(),
            )


def identical(session: Session, plain: PlainLoop) -> bool:
    """Whether both ended in the same weights, bit for bit."""
    ours = federations.global_weights(session)
    names = plain.model.state_dict()
    return all(torch.equal(ours[name], value) for name, value in zip(names, plain.weights, strict=True))


# ---- many clients


def crowd(clients: int) -> dict[str, Any]:
    """Settings of a federation of three architectures whose clients keep model and optimiser."""
    resnet = {"name": "resnet", "widths": [16, 32], "depths": [1, 1], "view": {"name": "pixels", "size": 16}}
    view = {"name": "tokens", "length": 8, "tokenizer": {"name": "hashing", "size": 512}}
    bag = {"name": "bag", "width": 64, "view": view}
    group = {
        "count": clients,
        "source": "noise",
        "models": [
            federations.image_model(16, 64),
            {"dim": 16, "encoders": {"image": resnet}},
            {"dim": 16, "encoders": {"text": bag}},
        ],
        "task": "classification",
        "training": {"optimizer": {"kind": "adamw", "lr": 1e-3}, "batch_size": 8},
    }
    return {
        "data": {"sources": {"noise": federations.Noise(count=8 * clients)}},
        "clients": {GROUP: group},
        "algorithm": {"name": "local", "local_epochs": 1},
        "run": {"rounds": 2, "threads": torch.get_num_threads(), "device": "cpu", "state_memory": 8_000_000},
    }


def resident() -> int:
    """Bytes of memory that the process holds now."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def take_part(session: Session, number: int, clients: slice) -> None:
    """Have some clients take part in a round."""
    everybody = session.cohort(number, Ledger())
    cohort = replace(everybody, clients=session.server.clients[clients])
    session.experiment.algorithm.round(session.server, cohort)


def bench_crowd(steps: tuple[int, ...]) -> None:
    """Memory after some, more and all clients took part, and after all did so again from their kept states."""
    with federations.prepared(crowd(steps[-1])) as session:
        sizes: dict[int, int] = {}
        done = 0
        for step in steps:
            take_part(session, 1, slice(done, step))
            sizes[step], done = resident(), step
        take_part(session, 2, slice(None))
        again = resident()
        kept = sum(path.stat().st_size for path in session.hosting.states.rglob("*")) // 2
        growth = (sizes[steps[-1]] - sizes[steps[0]]) / (steps[-1] - steps[0])
        harness.report(
            f"{steps[-1]:,} clients of three architectures with kept state: memory a client",
            ratio=growth / 1000,
            unit="kB",
            against=f"{steps[0]:,} clients",
            limit=GROWTH_LIMIT,
            state_a_client=kept / steps[-1],
            resident_megabytes={step: round(size / 1e6, 1) for step, size in sizes.items()},
            second_round_megabytes=round(again / 1e6, 1),
            resident_models=len(federations.site_of(session)._models),
            architectures=len({client.architecture for client in session.server.clients}),
            state_memory=session.experiment.run.state_memory,
            **harness.conditions(),
        )


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, fewer clients")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    repeats = 3 if arguments.quick else 9
    bench_fedavg("ResNet of 0.9 M weights", RESNET, rounds=1, repeats=repeats)
    bench_fedavg("perceptron of 1.2 M weights", federations.image_model(384, 1024), rounds=2, repeats=repeats)
    bench_fedavg("perceptron of 9,600 weights", federations.image_model(16, 12), rounds=4, repeats=repeats)
    bench_crowd((100, 200, 400) if arguments.quick else (100, 400, 1000))


if __name__ == "__main__":
    main()
