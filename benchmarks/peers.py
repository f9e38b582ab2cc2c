"""FedAvg in polyfed, in other libraries and in a plain PyTorch loop: same data, same initial weights, same arithmetic.

    python benchmarks/peers.py [--rivals pfl_research flower] [--clients 100 1000] [--rounds 6] [--repeats 3]
        [--envs FOLDER]

A rival runs in an environment of its own, which is made below FOLDER when it is missing (packages are downloaded then:
``RIVALS`` has their versions); polyfed and the plain loop run in this one. All clients take part in every round; each
has 20 samples and trains on them five times in one batch at rate 0.05 by plain SGD, so that the order of samples has no
effect; weights after the last round are compared with the plain loop's. Rivals take turns, ``repeats`` times; a figure
is the median over the rounds from the second on, and the ratio to the plain loop of the same turn. CPU seconds and the
peak of memory are those of all processes of a rival, data and interpreter included. Limits, of polyfed: the figure of
pfl-research in the same turns; without it, COST and MEMORY.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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
RIVALS: Mapping[str, tuple[str, ...]] = {AHEAD_OF: ("pfl[pytorch]==0.6.0",), "flower": ("flwr[simulation]==1.41.0",)}
OWN: Mapping[str, str] = {"plain": "plain", "polyfed": "polyfed_local"}
"""Row -> script, of those that run in this environment."""


def experiment(clients: int, rounds: int) -> dict[str, Any]:
    """The federation as polyfed's settings; nothing is evaluated within the rounds."""
    training = {"optimizer": {"kind": "sgd", "lr": RATE, "momentum": 0.0}, "batch_size": SAMPLES}
    sources = {"noise": federations.Noise(count=clients * SAMPLES)}
    group = {"count": clients, "model": federations.image_model(16, 12)}
    content = federations.classification(sources, group, training, {"name": "fedavg", "local_epochs": EPOCHS})
    content["run"] |= {"rounds": rounds + 1, "eval_every": rounds + 1, "threads": 1}
    return content


def stated(clients: int, rounds: int) -> Problem:
    """The problem with polyfed's data and initial weights."""
    with federations.prepared(experiment(clients, rounds)) as session:
        session.experiment.algorithm.setup(session.server)
        federation = session.federation
        samples = [federation.train(member) for member in federation.members.values()]
        images: np.ndarray = samples[0].inputs["image"].images
        x = [normalised(torch.from_numpy(images[own.rows["image"].numpy()]), "half").numpy() for own in samples]
        y = [own.targets["label"].numpy() for own in samples]
        initial = [value.clone().numpy() for value in federations.global_weights(session).values()]
    return Problem(np.stack(x), np.stack(y), initial, rounds, EPOCHS, RATE)


def solved(name: str, python: Path, problem: Path) -> Any:
    """Arrays that a rival in its environment stored next to the problem."""
    script, result = Path(__file__).parent / "rivals" / f"{OWN.get(name, name)}.py", problem.with_name("result.npz")
    result.unlink(missing_ok=True)
    with (log := problem.with_name("log")).open("w") as stream:  # what a rival leaves behind would keep a pipe open
        done = subprocess.run([python, script, problem, result], stdout=stream, stderr=stream, check=False)
    if done.returncode or not result.exists():
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{log.read_text()[-2000:]}")
    return np.load(result)


def environment(name: str, envs: Path) -> Path:
    """Interpreter of a rival, whose environment is made if it is missing."""
    folder = envs / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", TORCH, "psutil", *RIVALS[name]], check=True)
        (folder / "complete").touch()
    return python


def bench(clients: int, rounds: int, repeats: int, rivals: Mapping[str, Path]) -> None:
    """All rivals on one problem, in turns."""
    with tempfile.TemporaryDirectory() as path:
        problem = Path(path) / "problem.npz"
        stated(clients, rounds).write(problem)
        turns = [{name: solved(name, python, problem) for name, python in rivals.items()} for _ in range(repeats)]

    def ratios(name: str, figure: str) -> list[float]:
        return [float(np.median(turn[name][figure]) / np.median(turn["plain"][figure])) for turn in turns]

    plain = turns[0]["plain"]
    weights = [key for key in plain.files if key.startswith("w") and key != "wall"]
    ahead = median(ratios(AHEAD_OF, "cpu")) if AHEAD_OF in rivals else COST
    for name in rivals.keys() - {"plain"}:
        cpu = ratios(name, "cpu")
        harness.report(
            f"FedAvg, perceptron, {clients:,} clients: {name}",
            ratio=median(cpu),
            against="a plain PyTorch loop, CPU time",
            limit=ahead if name == "polyfed" else None,
            spread=[round(min(cpu), 2), round(max(cpu), 2)],
            largest_difference_of_weights=max(float(np.abs(turns[0][name][k] - plain[k]).max()) for k in weights),
        )
        harness.report(
            f"FedAvg, perceptron, {clients:,} clients: memory of {name}",
            ratio=median(ratios(name, "peak")),
            against="a plain PyTorch loop, peak of all processes",
            limit=MEMORY if name == "polyfed" else None,
        )


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path.home() / ".cache" / "polyfed-rivals"
    parser.add_argument("--envs", type=Path, default=folder, help="folder of the rivals' environments")
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument("--clients", nargs="*", type=int, default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=6, help="the first is not timed")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rivals = dict.fromkeys(OWN, Path(sys.executable))
    rivals |= {name: environment(name, given.envs) for name in given.rivals}
    for clients in given.clients:
        bench(clients, given.rounds, given.repeats, rivals)


if __name__ == "__main__":
    main()
