"""A GPU beside the CPU and beside plain PyTorch: same models, rounds, memory, 16 bits, and two processes on one GPU.

    python benchmarks/gpu.py            # all parts
    python benchmarks/gpu.py --only equality

``equality``: six methods, two rounds on generated scenes on the CPU and on the GPU, both in full float32 (no TF32) and
without dropout and stochastic depth, of which each device draws its own. The distance of their models as a share of
how far training moved them, all models together: at most 2 % (the CPU with another convolution: 0.006 to 1.6 %).
``rounds``: FedAvg on a residual network of 11 million weights against a plain loop on the same GPU with the same
batches, in float32 and with bfloat16 forward passes: time at most 1.05, memory at most 1.25 of the plain loop's.
``processes``: a run alone, and two at once on the same GPU: both end in the weights of the one alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import bits
import engine
import federations
import harness
import torch
from safetensors.torch import load_file
from torch import Tensor

from polyfed import Experiment, run
from polyfed.models.blocks import DropPath

METHODS = {
    "FedAvg": "transfer-fedavg",
    "FedCola": "fedcola-flickr8k",
    "CreamFL": "creamfl-flickr8k",
    "FedAFD": "fedafd-flickr8k",
    "FedAID": "fedaid-scenes",
    "change distillation": "exchange-change",
}
EQUAL, TIME, MEMORY = 0.02, 1.05, 1.25
RESNET = {
    "dim": 256,
    "encoders": {"image": {"name": "resnet", "size": "18", "stem": "small", "view": {"name": "pixels", "size": 32}}},
}
BATCH = 25


def trained(case: str, device: str, *more: str) -> dict[str, Tensor]:
    """All tensors of floats that a case of ``bits`` leaves on a device, by model and name."""
    preset, overrides = bits.CASES[case]
    places = (f"data.weights_dir={bits.networks()}", f"run.device={device}", *more)
    with tempfile.TemporaryDirectory() as folder:
        done = run(Experiment.load(preset, (*bits.RUN, *overrides, *places)), Path(folder) / "run", quiet=True).folder
        models = sorted((done / "models").rglob("*.safetensors"))
        found = {
            f"{path.relative_to(done)} {name}": value for path in models for name, value in load_file(path).items()
        }
    return {name: value.double() for name, value in found.items() if value.is_floating_point()}


def apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The Euclidean distance of two sets of tensors."""
    return float(sum((value - b[name]).square().sum() for name, value in a.items())) ** 0.5


def equality() -> None:
    """How far a GPU's models are from the CPU's."""
    for layer in (torch.nn.Dropout, DropPath):
        layer.forward = lambda self, x: x  # type: ignore[method-assign]
    for method, case in METHODS.items():
        here, there = trained(case, "cpu"), trained(case, "cuda")
        untrained = trained(case, "cpu", "run.rounds=1", "run.eval_every=1", *_still(case))
        harness.report(
            f"{method}: models of GPU and CPU apart",
            ratio=apart(there, here) / apart(here, untrained),
            against="how far two rounds moved them, float32",
            limit=EQUAL,
            tensors=len(here),
            same_names=here.keys() == there.keys(),
        )


def _still(case: str) -> tuple[str, ...]:
    """Overrides with which training moves nothing that counts."""
    groups = ("hospital",) if case == "fedaid-scenes" else ("image", "text", "paired")
    clients = [f"clients.{group}" for group in groups]
    owners = [*clients, "server"] if case.startswith(("creamfl", "fedafd", "exchange")) else clients
    return tuple(f"{owner}.training.optimizer.lr=1e-12" for owner in owners)


def rounds() -> None:
    """FedAvg's rounds against a plain loop on the same GPU."""
    for name, precision in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        content = engine.fedavg(RESNET, "cuda", BATCH)
        content["run"]["precision"] = name
        with federations.prepared(content) as session:
            plain = engine.PlainLoop(session, BATCH, precision)
            ours = engine.rounds_of(engine.in_memory(session.loop()), 1)
            works: dict[str, Callable[[], object]] = {"ours": ours, "plain": lambda plain=plain: plain.run(1)}
            times = harness.interleaved(works, 7)
            memory = {key: harness.peak_extra(work, "cuda") for key, work in works.items()}
            what = f"FedAvg, ResNet of {sum(v.numel() for v in plain.live) / 1e6:.0f} M weights, {name}"
            against = "a plain PyTorch loop on the same GPU"
            pictures = engine.COHORT * engine.SAMPLES
            harness.report(
                f"{what}: a round",
                ratio=times["ours"].wall / times["plain"].wall,
                against=f"{against}, wall time",
                limit=TIME,
                pictures_a_second=pictures / times["ours"].wall,
                rival_pictures_a_second=pictures / times["plain"].wall,
                cpu_ratio=times["ours"].cpu / times["plain"].cpu,
                **harness.conditions(),
            )
            harness.report(
                f"{what}: memory of the GPU",
                ratio=(memory["ours"] + 1) / (memory["plain"] + 1),
                against=against,
                limit=MEMORY,
                megabytes=memory["ours"] / 1e6,
                rival_megabytes=memory["plain"] / 1e6,
            )


def processes() -> None:
    """One run of CreamFL alone, then two at once."""
    alone, once = _together(1)
    both, twice = _together(2)
    same = [apart(each, alone[0]) == 0 for each in both]
    harness.report(
        "CreamFL, two processes on one GPU: wall time",
        ratio=twice / once,
        against="one process alone",
        same_weights_as_alone=all(same),
    )


def _together(count: int) -> tuple[list[dict[str, Tensor]], float]:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{k}.pt" for k in range(count)]
        began = perf_counter()
        started = [subprocess.Popen([sys.executable, __file__, "--save", str(file)]) for file in files]
        if codes := [process.wait() for process in started]:
            assert not any(codes), f"a process ended with {codes}"
        return [torch.load(file) for file in files], perf_counter() - began


PARTS: Mapping[str, Callable[[], None]] = {"equality": equality, "rounds": rounds, "processes": processes}


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        harness.lacking("a GPU that PyTorch can use")
        return
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    if arguments.save is not None:
        torch.save(trained(METHODS["CreamFL"], "cuda"), arguments.save)
        return
    details: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(details), flush=True)
    for part in arguments.only:
        PARTS[part]()


if __name__ == "__main__":
    main()
