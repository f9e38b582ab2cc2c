"""A GPU against the CPU and against plain PyTorch: same models, rounds, memory, 16 bits, and two processes on one GPU.

    make gpu                            # all parts, for the table of docs/reference/speed.md
    python benchmarks/gpu.py --only equality
    python benchmarks/gpu.py --device cpu --only rounds    # another device in the GPU's place, to try the code

Without a GPU it prints one line, with exit status 0.

``equality``: six methods, two rounds on generated scenes on the CPU and on the GPU, both in full float32 (no TF32) and
without dropout and stochastic depth, which each device draws differently. The distance of their models as a share of
how far training moved them, all models together: at most 2 % (the CPU with another convolution: 0.006 to 1.6 %).
``rounds``: FedAvg on a residual network of 11 million weights against a plain loop on the same GPU with the same
batches, in float32 and with bfloat16 forward passes, with data on the GPU and copied batch by batch: time at most 1.05,
memory at most 1.25 of the plain loop's, which copies its batches. Each round ends with the evaluation of the mean on
5,000 images and a file of its weights, in both.
``networks``: two rounds of FedCola and of CreamFL with their papers' networks at 224 pixels, from scratch on generated
scenes, in float32 and bfloat16.
``processes``: a run alone, and two at once on the same GPU: both end in the weights of the one alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import bits
import engine
import federations
import harness
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyfed import Experiment, run
from polyfed.data.images import normalised
from polyfed.models.blocks import DropPath
from polyfed.runs.session import Session

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
_PIXELS = "view: {name: pixels, size: 224}"
_TOKENS = "view: {name: tokens, length: 64, tokenizer: {name: hashing, size: 30522}}"
_VIT = f"image: {{name: blocks, size: small, {_PIXELS}}}", f"text: {{name: blocks, size: small, {_TOKENS}}}"
_SMALL = f"image: {{name: resnet, size: '18', {_PIXELS}}}", f"text: {{name: gru, width: 300, hidden: 256, {_TOKENS}}}"
_LARGE = f"image: {{name: resnet, size: '101', {_PIXELS}}}", f"text: {{name: bert, size: base, {_TOKENS}}}"


def sized(dim: int, clients: tuple[str, str], server: tuple[str, str]) -> tuple[str, ...]:
    """Overrides with encoders of images and of texts."""
    parts = {"image": clients[:1], "text": clients[1:], "paired": clients}
    models = {f"clients.{group}.models": own for group, own in parts.items()} | {"server.model": server}
    named = {key: f"{{dim: {dim}, encoders: {{{', '.join(own)}}}}}" for key, own in models.items()}
    return tuple(f"{key}={text if key == 'server.model' else f'[{text}]'}" for key, text in named.items())


NETWORKS = {
    "FedCola": ("fedcola-flickr8k", sized(384, _VIT, _VIT)),
    "CreamFL": ("creamfl-flickr8k", sized(512, _SMALL, _LARGE)),
}


class CompleteLoop(engine.PlainLoop):
    """Plain loop whose rounds end with an evaluation and a file of the weights."""

    def __init__(self, session: Session, precision: torch.dtype) -> None:
        super().__init__(session, BATCH, precision)
        self.test = session.federation.test(next(iter(session.federation.members.values())))
        self.file = session.folder.path / "plain.safetensors"

    def round(self, number: int) -> None:
        """Broadcast, train, average, evaluate, save."""
        super().round(number)
        torch._foreach_copy_(self.live, self.weights)
        rows, labels = self.test.rows["image"], self.test.targets["label"].to(self.device)
        images, hits = self.test.inputs["image"].images, list[Tensor]()
        self.model.eval()
        with torch.no_grad(), torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            for index in torch.arange(len(rows)).split(256):
                x = normalised(torch.from_numpy(images[rows[index].numpy()]).to(self.device), "half")
                hits.append(self.head(self.model.encoders["image"](x)).argmax(-1) == labels[index.to(self.device)])
        self.accuracy = float(torch.cat(hits).double().mean())
        save_file(dict(zip(self.model.state_dict(), self.weights, strict=True)), self.file)


@dataclass(frozen=True)
class Setup:
    """Scope of the measurements.

    Attributes:
        device: Device in the GPU's place.
        methods: Name -> case of ``bits``; two processes run the first.
        model: Model of the rounds that are timed.
        networks: Name -> case of ``bits``, and overrides with its paper's networks.
        repeats: Repetitions of these rounds.
    """

    device: str = "cuda"
    methods: Mapping[str, str] = field(default_factory=lambda: METHODS)
    model: Mapping[str, Any] = field(default_factory=lambda: RESNET)
    networks: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=lambda: NETWORKS)
    repeats: int = 7


def trained(case: str, device: str, *more: str) -> dict[str, Tensor]:
    """All tensors of floats that a case of ``bits`` leaves on a device, by model and name."""
    preset, overrides = bits.CASES[case]
    folders = (f"data.weights_dir={bits.networks()}", f"run.device={device}", *more)
    with tempfile.TemporaryDirectory() as folder:
        done = run(Experiment.load(preset, (*bits.RUN, *overrides, *folders)), Path(folder) / "run", quiet=True).folder
        models = sorted((done / "models").rglob("*.safetensors"))
        tensors = {
            f"{path.relative_to(done)} {name}": value for path in models for name, value in load_file(path).items()
        }
    return {name: value.double() for name, value in tensors.items() if value.is_floating_point()}


def apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Euclidean distance of two sets of tensors."""
    return float(sum((value - b[name]).square().sum() for name, value in a.items())) ** 0.5


@contextmanager
def without_draws() -> Iterator[None]:
    """Dropout and stochastic depth pass everything on."""
    kept = {layer: layer.forward for layer in (torch.nn.Dropout, DropPath)}
    try:
        for layer in kept:
            layer.forward = lambda self, x: x
        yield
    finally:
        for layer, forward in kept.items():
            layer.forward = forward


def equality(setup: Setup) -> None:
    """Distance of a GPU's models from the CPU's."""
    for method, case in setup.methods.items():
        with without_draws():
            here, there = trained(case, "cpu"), trained(case, setup.device)
            untrained = trained(case, "cpu", "run.rounds=1", "run.eval_every=1", *_still(case))
        harness.report(
            f"{method}: models of {setup.device} and CPU apart",
            ratio=apart(there, here) / apart(here, untrained),
            against="how far two rounds moved them, float32",
            limit=EQUAL,
        )


def _still(case: str) -> tuple[str, ...]:
    """Overrides with which training moves nothing that counts."""
    groups = ("hospital",) if case == "fedaid-scenes" else ("image", "text", "paired")
    clients = [f"clients.{group}" for group in groups]
    owners = [*clients, "server"] if case.startswith(("creamfl", "fedafd", "exchange")) else clients
    return tuple(f"{owner}.training.optimizer.lr=1e-12" for owner in owners)


def rounds(setup: Setup) -> None:
    """FedAvg's rounds against a plain loop on the same GPU."""
    for precision, most in product((torch.float32, torch.bfloat16), (1 << 30, 0)):
        name = str(precision).removeprefix("torch.")
        content = engine.fedavg(dict(setup.model), setup.device, BATCH)
        content["run"] |= {"precision": name, "eval_every": 1, "evaluate_clients": 1}
        content["data"]["device_memory"] = most
        content["clients"]["client"] |= {"test_split": "test", "test": "all"}
        with federations.prepared(content) as session:
            plain, ours = CompleteLoop(session, precision), federations.rounds_of(session.loop(), 1)
            works: dict[str, harness.Work] = {"ours": ours, "plain": lambda plain=plain: plain.run(1)}
            times = harness.interleaved(works, setup.repeats)
            memory = {key: harness.peak_extra(work, setup.device) for key, work in works.items()}
            title = f"FedAvg, {sum(value.numel() for value in plain.live) / 1e6:.1f} M weights, {name}"
            title += ", data on the device" if most else ", data copied"
            against = f"a plain PyTorch loop on the same {setup.device}"
            speed = engine.COHORT * engine.SAMPLES / times["ours"].wall
            time = times["ours"].wall / times["plain"].wall
            extra = (memory["ours"] + 1) / (memory["plain"] + 1)
            for what, ratio, rival, limit in (
                (f"{speed:,.0f} images per second: a round", time, f"{against}, wall time", TIME),
                (f"{memory['ours'] / 1e6:,.0f} MB: memory", extra, against, MEMORY),
            ):
                harness.report(f"{title}, {what}", ratio=ratio, against=rival, limit=limit)


def networks(setup: Setup) -> None:
    """Rounds with the papers' networks, in 16 bits against 32."""
    for method, (case, more) in setup.networks.items():
        seconds = {}
        for precision in ("float32", "bfloat16"):
            began = perf_counter()
            trained(case, setup.device, *more, f"run.precision={precision}")
            seconds[precision] = perf_counter() - began
        harness.report(
            f"{method}, its paper's networks, {seconds['bfloat16']:.0f} s: two rounds in bfloat16",
            ratio=seconds["bfloat16"] / seconds["float32"],
            against="the same in float32, wall time",
        )


def processes(setup: Setup) -> None:
    """One run alone, then two at once."""
    method, case = next(iter(setup.methods.items()))
    alone, once = _together(case, setup.device, 1)
    both, twice = _together(case, setup.device, 2)
    harness.report(
        f"{method}, two processes on one {setup.device}: weights apart from one alone",
        ratio=max(apart(each, alone[0]) for each in both),
        against="one process alone",
        limit=0.0,
    )
    harness.report(f"{method}, two processes on one {setup.device}: wall time", ratio=twice / once, against="one alone")


def _together(case: str, device: str, count: int) -> tuple[list[dict[str, Tensor]], float]:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{k}.pt" for k in range(count)]
        began = perf_counter()
        command = [sys.executable, __file__, "--device", device, "--save", case]
        started = [subprocess.Popen([*command, str(file)]) for file in files]
        codes = [process.wait() for process in started]
        assert not any(codes), f"a process ended with {codes}"
        return [torch.load(file) for file in files], perf_counter() - began


_MEASURES = (equality, rounds, networks, processes)
PARTS: Mapping[str, Callable[[Setup], None]] = {measure.__name__: measure for measure in _MEASURES}


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="cuda", help="device in the GPU's place")
    parser.add_argument("--save", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        harness.lacking("a GPU that PyTorch can use")
        return
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    if arguments.save is not None:
        case, file = arguments.save
        torch.save(trained(case, arguments.device), file)
        return
    for part in arguments.only:
        PARTS[part](Setup(arguments.device))


if __name__ == "__main__":
    main()
