"""Complementary local training (FedCola, section 4.2) against plain local training: time per step, and memory.

Limits: the cost of the formula itself, measured alone in the same run (W + g W_out forward, two passes backward, and
the optimiser's step on W_out where it is trained), with 5 % on the whole step; parameters, gradients and optimiser
state at most twice plain training's, with W_out frozen its own plus one copy of the gated weights; a step's peak at
most W_out, its two moments and the effective weights above that of plain training, frozen W_out and the latter.
"""

from __future__ import annotations

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
from polyfed.models.blocks import ROLES, gated, linears
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.model import Model, ModelSettings
from polyfed.optim.settings import OptimizerSettings

TOLERANCE = 1.05
WIDTH, DEPTH, PIXELS, PATCH, BATCH, CLASSES = 192, 4, 64, 16, 64, 10
TRAINING = TrainingSettings(optimizer=OptimizerSettings(kind="adamw", lr=1e-4, weight_decay=0.01), batch_size=BATCH)
X = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator(0, "x"))
LABELS = torch.randint(CLASSES, (BATCH,), generator=generator(0, "labels"))


@dataclass
class Case:
    """One way to train; its gates, if it has any, are in place.

    Attributes:
        model: Network that learns.
        outs: W_out by layer; empty for plain training.
        trainable: True if W_out is trained.
    """

    model: Model
    outs: Mapping[str, Tensor]
    trainable: bool

    def __post_init__(self) -> None:
        self.epochs = Epochs()
        self.trainer = Trainer(self.model, TRAINING, Clock(0, 1, 1), self.epochs)

    def step(self) -> None:
        """One optimiser step on the one batch."""
        for _ in self.epochs.through(1):
            self.trainer.step(F.cross_entropy(self.model.heads["label"](self.model.embed("image", X)), LABELS))

    def held(self) -> int:
        """Bytes of parameters, gradients and optimiser state as they are now."""
        state = self.trainer.optimizer.state
        return storage(
            tensor
            for value in self.model.parameters()
            for tensor in (value, value.grad, *(state[value].values() if value in state else ()))
        )

    def peak(self) -> int:
        """Bytes at the peak of a step: those that torch's CPU allocator hands out, above parameters and state.

        The log of the allocator omits the release of older memory; so gradients go before.
        """
        self.trainer.optimizer.zero_grad(set_to_none=True)
        now = peak = self.held()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
            self.step()
        with tempfile.TemporaryDirectory() as folder:
            log.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
            now += event["args"]["Bytes"]
            peak = max(peak, now)
        return peak


def storage(values: Iterable[object]) -> int:
    """Bytes of the storages of the tensors among these, each once."""
    storages = {value.untyped_storage().data_ptr(): value for value in values if isinstance(value, Tensor)}
    return sum(value.untyped_storage().nbytes() for value in storages.values())


def plain_model(seed: int) -> Model:
    """A ViT-Ti of fewer blocks with a classifier."""
    torch.manual_seed(seed)
    encoder = Blocks(size="tiny", depth=DEPTH, patch=PATCH, drop_path=0.0, view=Pixels(size=PIXELS))
    settings = ModelSettings(dim=WIDTH, encoders={"image": encoder})
    return settings.build({"label": nn.Linear(WIDTH, CLASSES)}, DataContext(Path("unused")))


def gated_case(stack: ExitStack, start: Model, *, trainable: bool) -> Case:
    """A copy of the model with another one's weights behind gates, as FedCola's client step makes it."""
    model, other = copy.deepcopy(start), plain_model(1).encoders["image"]
    outs = {name: layer.weight.detach() for name, layer in linears(other, ROLES["blocks"]).items()}
    stack.enter_context(gated(model.encoders["image"], outs, trainable=trainable))
    return Case(model, outs, trainable)


def passes_alone(outs: Iterable[Tensor], *, trainable: bool) -> Callable[[], None]:
    """Cost of the gates' formula: W + g W_out; <G, W_out>; with W_out trained g G and the optimiser's step on it."""
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


def bench_case(name: str, plain: Case, own: Case, times: Mapping[str, harness.Timing]) -> None:
    """Time and memory of one way to train with gates."""
    extra = times[f"{name}_alone"].cpu / times["plain"].cpu
    held, copied, few = plain.held(), storage(own.outs.values()), 64 * len(own.outs)  # a gate is a number with a state
    most, copies = (2.0, 4) if own.trainable else (1 + copied / held, 2)
    training = "parameters, gradients and optimiser state of plain training"
    step, peak = times[name].cpu / times["plain"].cpu, (own.peak() - plain.peak()) / copied
    for what, ratio, unit, against, limit in (
        ("a step", step, "", "a plain step, CPU time", TOLERANCE * (1 + extra)),
        ("memory held", own.held() / held, "", training, most + few / held),
        ("peak of a step", peak, "copies of the gated weights", "a plain step", copies + few / copied),
    ):
        harness.report(f"FedCola's gates, W_out {name}: {what}", ratio=ratio, unit=unit, against=against, limit=limit)


def main() -> None:
    """Run all."""
    quick = harness.parsed(harness.parser(__doc__)).quick
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
    start = plain_model(0)
    with ExitStack() as stack:
        plain = Case(copy.deepcopy(start), {}, trainable=False)
        cases = {name: gated_case(stack, start, trainable=name == "trained") for name in ("trained", "frozen")}
        works: dict[str, harness.Work] = {"plain": plain.step}
        for name, own in cases.items():
            works |= {name: own.step, f"{name}_alone": passes_alone(own.outs.values(), trainable=own.trainable)}
        times = harness.interleaved(works, 3 if quick else 25)
        for name, own in cases.items():
            bench_case(name, plain, own, times)


if __name__ == "__main__":
    main()
