"""Streams of updates into global models: memory against the number of clients, and speed against memory bandwidth.

Limits: one type averaged plainly needs three models (the global one, the running mean, and the update that is there),
three types by FedCola's rule the global models, their means and the results; folding an update in takes at most
1.25 x the time of ``lerp_`` on one flat tensor of the same size, measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import harness
import torch
from torch import Tensor, nn

from polyfed.aggregation.averaging import Averaging, GlobalModel
from polyfed.aggregation.averagings.tensors import ByType, CollaborativeAveraging, Rule
from polyfed.aggregation.mean import WeightedMean
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.model import Model
from polyfed.models.slots import model_slots
from polyfed.optim.servers import Models

Weights = dict[str, Tensor]
TIME_LIMIT = 1.25
SLACK = 1.05  # resident memory: the C allocator leaves gaps
WIDTH, SAMPLES = 384, 500
INPUTS = {"image": InputSpec((3, 224, 224)), "text": InputSpec((40,), tuple(map(str, range(30_522))))}
CLASSES = {"image": 100, "text": 4}
FEDCOLA = CollaborativeAveraging()


def global_model(*modalities: str) -> GlobalModel:
    """What aggregation knows of a ViT-S/16 client (methods, 1.1); nothing is drawn."""
    alone = len(modalities) == 1
    with torch.device("meta"):
        encoder, context = Blocks(size="small", final_norm=alone), DataContext(Path("unused"))
        encoders = {name: encoder.build(WIDTH, INPUTS[name], context) for name in modalities}
        heads = {"label": nn.Linear(WIDTH, CLASSES[modalities[0]])} if alone else {}
        model = Model(encoders, heads, WIDTH, final_norm=None if alone else nn.LayerNorm(WIDTH))
    return GlobalModel(model.state_dict(), model_slots(model), modalities)


class Population:
    """Types of clients, and updates made up on the spot.

    Attributes:
        kinds: type -> its global model, as aggregation knows it.
        sizes: bytes of a model by type.
    """

    def __init__(self, averaging: ByType, *types: tuple[str, ...]) -> None:
        self.averaging = averaging
        self.kinds = {"+".join(modalities): global_model(*modalities) for modalities in types}
        self.sizes = {
            kind: 4 * sum(value.numel() for value in held.weights.values()) for kind, held in self.kinds.items()
        }

    def rule(self, samples: Mapping[str, float]) -> Rule:
        """Of the averaging, given samples by type; of one type alone it is the type's own mean."""
        return self.averaging.rule(self.kinds, samples)

    def model(self, kind: str, value: float) -> Weights:
        """A model or update in memory of its own; what its numbers are changes no time."""
        return {name: torch.full(meta.shape, value) for name, meta in self.kinds[kind].weights.items()}

    def models(self) -> dict[str, Weights]:
        """The global models."""
        return {kind: self.model(kind, 0.0) for kind in self.kinds}

    def exact(self, models: Models, updates: int) -> Models:
        """One round of so many updates."""
        return self._averaged(self.averaging, models, updates)

    def at(self, models: Models) -> dict[str, GlobalModel]:
        """The global models with these weights."""
        return {kind: replace(held, weights=models[kind]) for kind, held in self.kinds.items()}

    def sequential(self, models: Models, updates: int) -> Models:
        """The released code's, likewise."""
        sequential = self.averaging.model_copy(update={"mean": "sequential"})
        return self._averaged(sequential, models, updates)

    def _averaged(self, averaging: Averaging, models: Models, updates: int) -> Models:
        means = averaging.new_means(self.at(models), self.samples(updates))
        for update in self.updates(updates):
            means[update[0]].add(*update[1:])
            del update
        return averaging.average(self.at(models), means)

    def updates(self, number: int) -> Iterator[tuple[str, Weights, float]]:
        """So many updates of the types in turn, each made when it is asked for."""
        for index, kind in zip(range(number), cycle(self.kinds)):
            yield kind, self.model(kind, float(index)), SAMPLES

    def samples(self, updates: int) -> dict[str, float]:
        """Samples of each type when so many updates are dealt out among the types."""
        kinds = list(self.kinds)
        return {kind: float(SAMPLES * len(range(k, updates, len(kinds)))) for k, kind in enumerate(kinds)}

    def stream(self, average: Callable[[Models, int], Models], updates: int) -> Callable[[], object]:
        """A round from nothing: models, then updates of the types in turn, of which one is held at a time; results."""

        def work() -> object:
            models = self.models()
            return models, average(models, updates)

        return work


def bench_memory(name: str, federation: Population, updates: int, limit: float) -> None:
    """Peak memory of a round of so many updates, and of a tenth of them."""
    averages = {"exact": federation.exact, "sequential": federation.sequential}
    together = sum(federation.sizes.values())
    for kind, average in averages.items():
        peak, few = (harness.peak_extra(federation.stream(average, number)) for number in (updates, updates // 10))
        harness.report(
            f"{updates} updates of {name}, {kind}: peak memory",
            ratio=peak / together,
            against="bytes of a model of each type",
            limit=SLACK * limit,
            updates=updates,
            ratio_of_a_tenth_of_the_updates=few / together,
            model_megabytes={key: round(size / 1e6, 1) for key, size in federation.sizes.items()},
            peak_extra_bytes=peak,
        )


def bench_speed(name: str, federation: Population, updates: int, repeats: int) -> None:
    """Folding one update in, type by type, against one flat tensor of the same size."""
    models = federation.models()
    asked = federation.samples(updates)
    rule = federation.rule(asked)
    running = federation.averaging.model_copy(update={"mean": "sequential"}).new_means(federation.at(models), asked)
    for kind, size in federation.sizes.items():
        update, mean = federation.model(kind, 1.0), WeightedMean()
        flat, other = torch.zeros(size // 4), torch.ones(size // 4)
        mean.add(update, SAMPLES)  # the first is only copied
        works: dict[str, harness.Work] = {
            "exact": lambda: mean.add(update, SAMPLES),  # noqa: B023
            "sequential": lambda: running[kind].add(update, SAMPLES),  # noqa: B023
            "flat": lambda: flat.lerp_(other, 0.1),  # noqa: B023
            "copy": lambda: flat.copy_(other),  # noqa: B023
        }
        times = harness.interleaved(works, repeats)
        moved = {"exact": 3 * size, "sequential": 3 * folded(federation.kinds, update, rule, kind)}
        for fold, traffic in moved.items():
            report_speed(f"an update of {name}, {kind}, {fold}: time", times, fold, traffic, size)


def folded(kinds: Mapping[str, GlobalModel], update: Weights, rule: Rule, kind: str) -> int:
    """Bytes of an update that go into global models; what goes into two counts twice."""
    return sum(
        update[name].nbytes
        for shares in rule.values()
        for share in shares
        if share.source == kind
        for name in kinds[kind].keys[share.slot].values()
    )


def report_speed(name: str, times: Mapping[str, harness.Timing], fold: str, traffic: int, size: int) -> None:
    """Bytes read and written a second by a fold, ``lerp_`` and a copy."""
    rates = {
        "fold": traffic / times[fold].cpu,
        "flat": 3 * size / times["flat"].cpu,
        "copy": 2 * size / times["copy"].cpu,
    }
    ratio = rates["flat"] / rates["fold"]
    harness.report(
        name,
        ratio=ratio,
        against="lerp_ on one flat tensor, CPU time by byte",
        limit=TIME_LIMIT,
        milliseconds=1e3 * times[fold].cpu,
        gigabytes_a_second={key: round(rate / 1e9, 2) for key, rate in rates.items()},
        **harness.conditions(),
    )


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer updates and repetitions")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    updates, repeats = (20, 5) if arguments.quick else (100, 15)
    one = Population(ByType(), ("image",))
    three = Population(FEDCOLA, ("image",), ("text",), ("image", "text"))
    for name, federation in {"one type": one, "three types": three}.items():
        bench_memory(name, federation, updates, limit=3)
        bench_speed(name, federation, updates, repeats)


if __name__ == "__main__":
    main()
