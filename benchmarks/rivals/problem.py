"""The one problem that all rivals solve, with numpy, torch and psutil alone: arrays, network, clock, result.

A rival is ``python rivals/NAME.py PROBLEM.npz RESULT.npz``, in an environment of its own. It runs FedAvg with all
clients in every round, each of which trains ``epochs`` times on its samples in one batch, so that the order of samples
has no effect and all rivals do the same arithmetic.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Clock:
    """Seconds of CPU, of this process and all its descendants, and of the wall, round by round.

    The first round, in which a rival sets itself up, does not count.
    """

    laps: list[tuple[float, float]] = field(default_factory=list)

    def lap(self) -> None:
        """A round has ended."""
        self.laps.append((_cpu(psutil.Process()), time.perf_counter()))

    def seconds(self) -> tuple[list[float], list[float]]:
        """CPU and wall seconds of each round from the second on."""
        pairs = list(zip(self.laps, self.laps[1:], strict=False))
        cpu, wall = ([after[k] - before[k] for before, after in pairs] for k in (0, 1))
        return cpu, wall


@dataclass
class Problem:
    """The problem.

    Attributes:
        x: Images [clients, samples, 3, side, side], float32.
        y: Labels [clients, samples], int64.
        initial: Weights of the network, in the order of its ``state_dict``.
        rounds: Rounds, the first of which is not timed.
        epochs: Steps of a client per round.
        rate: Learning rate of plain SGD.
        clock: Times of the rounds.
        peak: Bytes at the peak, for a rival whose processes end before ``finish``.
    """

    x: np.ndarray
    y: np.ndarray
    initial: list[np.ndarray]
    rounds: int
    epochs: int
    rate: float
    clock: Clock = field(default_factory=Clock)
    peak: int = 0

    @classmethod
    @cache
    def read(cls, path: str = sys.argv[1], *, data: bool = True) -> Problem:
        """The problem of the command line, on one thread; without ``data`` for a rival that has its own."""
        torch.set_num_threads(1)
        with np.load(path) as stored:
            settings = json.loads(str(stored["settings"]))
            initial = [stored[f"w{k}"] for k in range(settings.pop("weights"))]
            y = stored["y"]
            return cls(stored["x"] if data else y, y, initial, **settings)

    def write(self, path: Path) -> None:
        """Store it for ``read``."""
        settings = {key: getattr(self, key) for key in ("rounds", "epochs", "rate")}
        settings["weights"] = len(self.initial)
        weights = {f"w{k}": value for k, value in enumerate(self.initial)}
        np.savez(path, x=self.x, y=self.y, settings=json.dumps(settings), **weights)

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.x)

    def network(self) -> nn.Sequential:
        """The network with its initial weights."""
        model = perceptron(self.initial)
        with torch.no_grad():
            for value, start in zip(model.state_dict().values(), self.initial, strict=True):
                value.copy_(torch.from_numpy(start))
        return model

    def train(self, network: nn.Module, client: int) -> None:
        """A client's steps of plain SGD."""
        x, y = torch.from_numpy(self.x[client]), torch.from_numpy(self.y[client])
        optimizer = torch.optim.SGD(network.parameters(), lr=self.rate, fused=True)
        for _ in range(self.epochs):
            loss = F.cross_entropy(network(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    def finish(self, weights: Iterable[np.ndarray], *packages: str) -> None:
        """Store how long it took, what came out, and with which versions."""
        cpu, wall = self.clock.seconds()
        versions = json.dumps({name: version(name) for name in ("torch", *packages)})
        arrays = {f"w{k}": np.asarray(value) for k, value in enumerate(weights)}
        np.savez(sys.argv[2], cpu=cpu, wall=wall, peak=self.peak or peak(), versions=versions, **arrays)
        sys.stdout.flush()
        os._exit(0)  # some rivals leave servers and queues behind


def perceptron(weights: list[np.ndarray]) -> nn.Sequential:
    """One hidden layer, an embedding and a classifier, of the weights' sizes."""
    (hidden, inputs), embedding, classes = weights[0].shape, weights[2].shape[0], weights[4].shape[0]
    body = (nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, embedding))
    return nn.Sequential(*body, nn.Linear(embedding, classes))


def peak() -> int:
    """Most bytes that this process and each that it began had resident; ``ru_maxrss`` would have its parent's."""
    members = [psutil.Process(), *psutil.Process().children(recursive=True)]
    texts = [Path(f"/proc/{member.pid}/status").read_text() for member in members]
    return sum(int(text.split("VmHWM:")[1].split()[0]) * 1024 for text in texts)


def _cpu(process: psutil.Process) -> float:
    total = time.process_time()  # finer than what psutil has of others
    for member in process.children(recursive=True):
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
