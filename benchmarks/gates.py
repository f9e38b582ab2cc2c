"""Complementary local training (FedCola, section 4.2) against plain local training: time a step, and memory.

Limits: what the formula itself costs, measured alone in the same run (W + g W_out forward, two passes backward, and
the optimiser's step on W_out where it is trained), with 5 % on the whole step; parameters, gradients and optimiser
state at most twice plain training's, with W_out frozen its own plus one copy of the gated weights; a step's peak at
most W_out, its two moments and the effective weights above that of plain training, frozen W_out and the latter.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import harness
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from polyfed.core.randomness import generator
from polyfed.data.view import DataContext
from polyfed.data.views.pixels import Pixels
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Clock, Epochs, Trainer
from polyfed.models.blocks import ROLES, GatedWeight, gated, linears
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.model import Model, ModelSettings
from polyfed.optim.settings import OptimizerSettings

TOLERANCE = 1.05
WIDTH, DEPTH, PIXELS, PATCH, BATCH, CLASSES = 192, 4, 64, 16, 64, 10
TRAINING = TrainingSettings(optimizer=OptimizerSettings(kind="adamw", lr=1e-4, weight_decay=0.01), batch_size=BATCH)
CLOCK = Clock(0, 1, 1)
X = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator(0, "x"))
LABELS = torch.randint(CLASSES, (BATCH,), generator=generator(0, "labels"))


@dataclass
class Case:
    """One way to train; its gates, if it has any, are in place.

    Attributes:
        outs: W_out by layer.
        trainable: whether W_out is trained.
    """

    model: Model
    gates: Mapping[str, GatedWeight]
    outs: Mapping[str, Tensor]
    trainable: bool

    def __post_init__(self) -> None:
        self.epochs = Epochs()
        self.trainer = Trainer(self.model, TRAINING, CLOCK, self.epochs)

    def step(self) -> None:
        """One optimiser step on the one batch."""
        for _ in self.epochs.through(1):
            self.trainer.step(F.cross_entropy(self.model.heads["label"](self.model.embed("image", X)), LABELS))

    def sizes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimiser state as they are now, by storage."""
        return {
            "parameters": held(self.model.parameters()),
            "gradients": held(value.grad for value in self.model.parameters()),
            "state": held(part for value in self.model.parameters() for part in self.state(value)),
        }

    def out_sizes(self) -> dict[str, int]:
        """Bytes that come with the matrices W_out."""
        outs = [gate.out for gate in self.gates.values()]
        return {
            "out_parameter_bytes": held(outs),
            "out_gradient_bytes": held(out.grad for out in outs),
            "out_state_bytes": held(part for out in outs for part in self.state(out)),
        }

    def state(self, value: Tensor) -> list[Tensor]:
        """The optimiser's tensors of a parameter."""
        kept = self.trainer.optimizer.state
        return [part for part in kept[value].values() if torch.is_tensor(part)] if value in kept else []


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages of tensors, each once."""
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in tensors if value is not None}
    return sum(storage.nbytes() for storage in storages.values())


def plain_model(seed: int) -> Model:
    """A ViT-Ti of fewer blocks with a classifier."""
    torch.manual_seed(seed)
    encoder = Blocks(size="tiny", depth=DEPTH, patch=PATCH, drop_path=0.0, view=Pixels(size=PIXELS))
    settings = ModelSettings(dim=WIDTH, encoders={"image": encoder})
    return settings.build({"label": nn.Linear(WIDTH, CLASSES)}, DataContext(Path("unused")))


def case(stack: ExitStack, start: Model, *, trainable: bool) -> Case:
    """A copy of the model with another one's weights behind gates, as FedCola's client step makes it."""
    model = copy.deepcopy(start)
    encoder, other = model.encoders["image"], plain_model(1).encoders["image"]
    outs = {name: layer.weight.detach() for name, layer in linears(other, ROLES["blocks"]).items()}
    return Case(model, stack.enter_context(gated(encoder, outs, trainable=trainable)), outs, trainable)


def passes_alone(outs: Iterable[Tensor], *, trainable: bool) -> Callable[[], None]:
    """What gates must cost: W + g W_out; <G, W_out>; and with W_out trained g G and the optimiser's step on it."""
    weights = [(torch.randn_like(out), torch.randn_like(out), nn.Parameter(out.clone())) for out in outs]
    optimizer = TRAINING.optimizer.build([out for _, _, out in weights])

    @torch.no_grad()
    def work() -> None:
        effective = [torch.add(weight, out, alpha=0.1) for weight, _, out in weights]
        for _, gradient, out in weights:
            torch.dot(gradient.flatten(), out.flatten())
            out.grad = 0.1 * gradient if trainable else None
        if trainable:
            optimizer.step()
        del effective

    return work


def peak_of(found: Case) -> int:
    """Bytes at the peak of a step: what torch's CPU allocator hands out in it, above parameters and state.

    The log of the allocator misses that older memory is freed; so gradients go before.
    """
    found.trainer.optimizer.zero_grad(set_to_none=True)
    now = peak = sum(found.sizes().values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        found.step()
    with tempfile.TemporaryDirectory() as folder:
        log.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


def bench_case(name: str, plain: Case, found: Case, times: Mapping[str, harness.Timing]) -> None:
    """Time and memory of one way to train with gates."""
    extra = times[f"{name}_alone"].cpu / times["plain"].cpu
    ratio = times[name].cpu / times["plain"].cpu
    harness.report(
        f"FedCola's gates, W_out {name}: a step",
        ratio=ratio,
        against="a plain step, CPU time",
        limit=TOLERANCE * (1 + extra),
        ratio_of_the_passes_alone=1 + extra,
        milliseconds=1e3 * times[name].cpu,
        rival_milliseconds=1e3 * times["plain"].cpu,
        gates=len(found.gates),
        **harness.conditions(),
    )
    mine, theirs, copied = found.sizes(), plain.sizes(), held(found.outs.values())
    whole = sum(mine.values()) / sum(theirs.values())
    limit = 2.0 if found.trainable else 1 + copied / sum(theirs.values())
    few = 64 * len(found.gates)  # a gate is a number with a gradient and a state of its own
    harness.report(
        f"FedCola's gates, W_out {name}: memory held",
        ratio=whole,
        against="parameters, gradients and optimiser state of plain training",
        limit=limit + few / sum(theirs.values()),
        gated_bytes=copied,
        **found.out_sizes(),
        bytes=mine,
        rival_bytes=theirs,
    )
    peaks = [peak_of(each) for each in (found, plain)]
    most = 4 if found.trainable else 2
    harness.report(
        f"FedCola's gates, W_out {name}: peak of a step",
        ratio=(peaks[0] - peaks[1]) / copied,
        unit="copies of the gated weights",
        against="a plain step",
        limit=most + few / copied,
        peak_bytes=peaks[0],
        rival_bytes=peaks[1],
    )


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's chatter
    start = plain_model(0)
    with ExitStack() as stack:
        plain = Case(copy.deepcopy(start), {}, {}, trainable=False)
        cases = {name: case(stack, start, trainable=name == "trained") for name in ("trained", "frozen")}
        works: dict[str, harness.Work] = {"plain": plain.step}
        for name, found in cases.items():
            works[name] = found.step
            works[f"{name}_alone"] = passes_alone(found.outs.values(), trainable=found.trainable)
        times = harness.interleaved(works, 3 if arguments.quick else 25)
        for name, found in cases.items():
            bench_case(name, plain, found, times)


if __name__ == "__main__":
    main()
