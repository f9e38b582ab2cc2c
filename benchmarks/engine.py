"""FedAvg's rounds on the local engine against a plain PyTorch loop.

Limit: at most 1.05 x the time of a plain loop with the same arithmetic in the same run, to the same bits.
"""

from __future__ import annotations

from typing import Any

import federations
import harness
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.randomness import generator
from polyfed.data.images import normalised
from polyfed.runs.session import Session

TIME_LIMIT = 1.05
CLIENTS, COHORT, SAMPLES, BATCH, LR = 100, 20, 50, 10, 0.05
SEED = 0
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "ResNet of 0.9 M weights": (
        {
            "dim": 256,
            "encoders": {
                "image": {"name": "resnet", "widths": [28, 56, 112, 208], "view": {"name": "pixels", "size": 16}}
            },
        },
        1,
    ),
    "perceptron of 1.2 M weights": (federations.image_model(384, 1024), 2),
    "perceptron of 9,600 weights": (federations.image_model(16, 12), 4),
}
"""Name -> settings of the model, and rounds that are timed."""


def fedavg(model: dict[str, Any], device: str = "cpu", batch: int = BATCH) -> dict[str, Any]:
    """Settings of a run without evaluation in the rounds that are timed."""
    training = {"optimizer": {"kind": "sgd", "lr": LR, "momentum": 0.0}, "batch_size": batch}
    sources = {"noise": federations.Noise(count=CLIENTS * SAMPLES)}
    group = {"count": CLIENTS, "model": model}
    content = federations.classification(sources, group, training, {"name": "fedavg", "local_epochs": 1})
    content["run"] |= {"device": device, "sampling": {"cohort": COHORT}, "seed": SEED}
    return content


class PlainLoop:
    """FedAvg as one would write it for this one case: one model, no messages, no checks, nothing kept."""

    def __init__(self, session: Session, batch: int = BATCH, precision: torch.dtype = torch.float32) -> None:
        federation, device = session.federation, session.experiment.run.device
        self.device, self.batch, self.precision = torch.device(device), batch, precision
        members = federation.members.values()
        self.ids = [member.id for member in members]
        self.samples = [federation.train(member) for member in members]
        self.images: np.ndarray = self.samples[0].inputs["image"].images
        self.model = federation.client_model(next(iter(members))).to(self.device)
        (self.head,) = self.model.heads.values()
        self.live = list(self.model.state_dict().values())  # counters of batches are equal for all clients
        self.floating = [k for k, value in enumerate(self.live) if value.is_floating_point()]
        self.start = [value.clone() for value in self.live]
        self.weights = self.start

    def run(self, rounds: int) -> None:
        """Rounds from the initial weights."""
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
            x = normalised(torch.from_numpy(self.images[rows[index].numpy()]).to(self.device), "half")
            wanted = labels[index].to(self.device)
            with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                loss = F.cross_entropy(self.head(encoder(x)), wanted)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    def equals(self, session: Session) -> bool:
        """True if a session ended in the same weights, bit for bit."""
        ours, names = federations.global_weights(session), self.model.state_dict()
        return all(torch.equal(ours[name], value) for name, value in zip(names, self.weights, strict=True))


def bench(name: str, rounds: int, repeats: int) -> None:
    """Rounds of FedAvg with a run folder against the plain loop."""
    with federations.prepared(fedavg(MODELS[name][0])) as session:
        plain, ours = PlainLoop(session), federations.rounds_of(session.loop(), rounds)
        times = harness.interleaved({"ours": ours, "plain": lambda: plain.run(rounds)}, repeats)
        harness.report(
            f"FedAvg, {name}: a round",
            ratio=times["ours"].wall / times["plain"].wall,
            against="a plain PyTorch loop, wall time",
            limit=TIME_LIMIT,
            cpu_ratio=times["ours"].cpu / times["plain"].cpu,
            identical_bits=plain.equals(session),
        )


def main() -> None:
    """Run all."""
    quick = harness.parsed(harness.parser(__doc__)).quick
    for name, (_, rounds) in MODELS.items():
        bench(name, rounds, 3 if quick else 9)


if __name__ == "__main__":
    main()
