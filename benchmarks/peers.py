"""FedAvg in polyfed beside other libraries and a plain PyTorch loop: same data, same initial weights, same arithmetic.

    python benchmarks/peers.py [--rivals pfl_research] [--clients 100 1000] [--rounds 6] [--repeats 3] [--envs FOLDER]

Every rival runs in an environment of its own, which is made below FOLDER when it is missing (packages are downloaded
then: ``RIVALS`` has their versions); polyfed and the plain loop run in this one. All clients take part in every round;
each has 20 samples, which it learns five times in one batch at rate 0.05 by plain SGD, so that no order of samples
matters; weights after the last round are compared with the plain loop's. Rivals take turns, ``repeats`` times; a figure
is the median over the rounds from the second on, and the ratio to the plain loop of the same turn. CPU seconds are of
all processes that a rival started, and so is the peak of memory, data and interpreter included. Limits, of polyfed:
what pfl-research has in the same turns; without it, COST and MEMORY.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import federations
import harness
import numpy as np
import torch

sys.path.append(str(Path(__file__).parent / "rivals"))
from problem import Problem

from polyfed.data.images import normalised

SAMPLES, EPOCHS, RATE = 20, 5, 0.05
COST, MEMORY = 2.0, 1.5
AHEAD_OF = "pfl_research"
TORCH = "torch==2.13.0"
RIVALS: Mapping[str, tuple[str, ...]] = {
    "flower_simulation": ("flwr[simulation]==1.41.0",),
    "pfl_research": ("pfl[pytorch]==0.6.0",),
    "fedlab_standalone": ("fedlab==1.3.0",),
}
MODELS: Mapping[str, tuple[int, dict[str, Any]]] = {  # side of the pictures, model
    "perceptron": (16, federations.image_model(16, 12)),
    "lenet": (32, {"dim": 84, "encoders": {"image": federations.LeNet()}}),
}


def experiment(kind: str, clients: int, rounds: int) -> dict[str, Any]:
    """The federation as polyfed's settings; nothing is evaluated within the rounds."""
    side, model = MODELS[kind]
    training = {"optimizer": {"kind": "sgd", "lr": RATE, "momentum": 0.0}, "batch_size": SAMPLES}
    group = {"count": clients, "source": "noise", "model": model, "task": "classification", "training": training}
    return {
        "data": {"sources": {"noise": federations.Noise(count=clients * SAMPLES, side=side)}},
        "clients": {"client": group},
        "algorithm": {"name": "fedavg", "local_epochs": EPOCHS},
        "run": {"rounds": rounds + 1, "eval_every": rounds + 1, "threads": 1, "device": "cpu"},
    }


def stated(kind: str, clients: int, rounds: int) -> Problem:
    """The problem with polyfed's data and initial weights."""
    with federations.prepared(experiment(kind, clients, rounds)) as session:
        session.experiment.algorithm.setup(session.server)
        federation = session.federation
        samples = [federation.train(member) for member in federation.members.values()]
        pictures: np.ndarray = samples[0].inputs["image"].pictures  # type: ignore[attr-defined]
        x = [normalised(torch.from_numpy(pictures[own.rows["image"].numpy()]), "half").numpy() for own in samples]
        y = [own.targets["label"].numpy() for own in samples]
        initial = [value.clone().numpy() for value in federations.global_weights(session).values()]
    return Problem(np.stack(x), np.stack(y), initial, rounds, EPOCHS, RATE, kind)


@dataclass(frozen=True)
class Rival:
    """One that solves the problem.

    Attributes:
        script: in ``rivals``, without suffix.
        python: interpreter of its environment.
    """

    script: str
    python: Path

    def solve(self, problem: Path, folder: Path) -> Any:
        """The arrays that it stored."""
        result = folder / "result.npz"
        result.unlink(missing_ok=True)
        script = Path(__file__).parent / "rivals" / f"{self.script}.py"
        command = [str(self.python), str(script), str(problem), str(result)]
        with (folder / f"{self.script}.log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=log, check=False)
        if done.returncode or not result.exists():
            end = (folder / f"{self.script}.log").read_text()[-2000:]
            raise RuntimeError(f"{self.script} ended with {done.returncode}:\n{end}")
        return np.load(result)


def environment(name: str, envs: Path) -> Path:
    """The interpreter of a rival, whose environment is made if it is missing."""
    folder = envs / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", TORCH, "psutil", *RIVALS[name]], check=True)
        (folder / "complete").touch()
    return python


def bench(kind: str, clients: int, rounds: int, repeats: int, rivals: Mapping[str, Rival]) -> None:
    """All rivals on one problem, in turns."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        problem = folder / "problem.npz"
        stated(kind, clients, rounds).write(problem)
        turns = [{name: rival.solve(problem, folder) for name, rival in rivals.items()} for _ in range(repeats)]
    ratios = {
        name: {
            what: [float(np.median(turn[name][what]) / np.median(turn["plain"][what])) for turn in turns]
            for what in ("cpu", "wall", "peak")
        }
        for name in rivals
    }
    for name, own in ratios.items():
        if name == "plain":
            continue
        found = [turn[name] for turn in turns]
        limit = median(ratios[AHEAD_OF]["cpu"]) if AHEAD_OF in ratios else COST
        weights = [key for key in found[0].files if key.startswith("w") and key != "wall"]
        harness.report(
            f"FedAvg, {kind}, {clients:,} clients: {name}",
            ratio=median(own["cpu"]),
            against="a plain PyTorch loop, CPU time",
            limit=limit if name == "polyfed" else None,
            spread=[round(min(own["cpu"]), 2), round(max(own["cpu"]), 2)],
            wall_ratio=median(own["wall"]),
            cpu_ms_a_client=1e3 * median(float(np.median(turn["cpu"])) for turn in found) / clients,
            wall_ms_a_client=1e3 * median(float(np.median(turn["wall"])) for turn in found) / clients,
            largest_difference_of_weights=max(
                float(np.abs(found[0][key] - turns[0]["plain"][key]).max()) for key in weights
            ),
            versions=json.loads(str(found[0]["versions"])),
        )
        harness.report(
            f"FedAvg, {kind}, {clients:,} clients: memory of {name}",
            ratio=median(own["peak"]),
            against="a plain PyTorch loop, peak of the process",
            limit=MEMORY if name == "polyfed" else None,
            megabytes=max(float(turn["peak"]) for turn in found) / 1e6,
        )


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path.home() / ".cache" / "polyfed-rivals"
    parser.add_argument("--envs", type=Path, default=folder, help="where the rivals' environments are, or are made")
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clients", nargs="*", type=int, default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=6, help="the first is not timed")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    here = Path(sys.executable)
    rivals = {"plain": Rival("plain", here), "polyfed": Rival("polyfed_local", here)}
    rivals |= {name: Rival(name, environment(name, options.envs)) for name in options.rivals}
    for kind in options.models:
        for clients in options.clients:
            bench(kind, clients, options.rounds, options.repeats, rivals)


if __name__ == "__main__":
    main()
