"""Streams of updates into global models: memory against the number of clients, and speed against memory bandwidth.

Limits: one type averaged plainly needs three models (the global one, the running mean, and the update in hand), three
types by FedCola's rule the global models, their means and the results; adding an update takes at most 1.25 x the time
of ``lerp_`` on one flat tensor of the same size, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import harness
import torch
from torch import Tensor, nn

from polyfed.aggregation.averaging import GlobalModel
from polyfed.aggregation.averagings.tensors import ByType, CollaborativeAveraging
from polyfed.aggregation.mean import WeightedMean
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.model import Model
from polyfed.models.slots import model_slots

TIME_LIMIT, MODELS = 1.25, 3
SLACK = 1.05  # resident memory: the C allocator leaves gaps
WIDTH, SAMPLES = 384, 500
INPUTS = {"image": InputSpec((3, 224, 224)), "text": InputSpec((40,), tuple(map(str, range(30_522))))}
CLASSES = {"image": 100, "text": 4}


def global_model(*modalities: str) -> GlobalModel:
    """Meta tensors of a ViT-S/16 client's global model (methods, 1.1)."""
    alone = len(modalities) == 1
    with torch.device("meta"):
        encoder, context = Blocks(size="small", final_norm=alone), DataContext(Path("unused"))
        encoders = {name: encoder.build(WIDTH, INPUTS[name], context) for name in modalities}
        heads = {"label": nn.Linear(WIDTH, CLASSES[modalities[0]])} if alone else {}
        model = Model(encoders, heads, WIDTH, final_norm=None if alone else nn.LayerNorm(WIDTH))
    return GlobalModel(model.state_dict(), model_slots(model), modalities)


class Population:
    """Types of clients, and their updates, made when they are requested."""

    def __init__(self, averaging: ByType, *types: tuple[str, ...]) -> None:
        self.averaging = averaging
        self.models = {"+".join(modalities): global_model(*modalities) for modalities in types}

    def tensors(self, model: str, value: float) -> dict[str, Tensor]:
        """A model or update in memory of its own."""
        return {name: torch.full(meta.shape, value) for name, meta in self.models[model].weights.items()}

    def updates(self, number: int) -> Iterator[tuple[str, dict[str, Tensor], float]]:
        """Updates of the types in turn."""
        for index, name in zip(range(number), cycle(self.models)):
            yield name, self.tensors(name, float(index)), SAMPLES

    def round(self, updates: int) -> object:
        """One round from nothing: global models, updates one by one, and results."""
        held = {name: replace(model, weights=self.tensors(name, 0.0)) for name, model in self.models.items()}
        means = {name: WeightedMean() for name in self.models}
        for update in self.updates(updates):
            means[update[0]].add(*update[1:])
            del update
        return held, self.averaging.of_means(held, means)


def bench_memory(name: str, population: Population, updates: int) -> None:
    """Peak memory of a round of so many updates, and of a tenth of them."""
    one = sum(4 * value.numel() for model in population.models.values() for value in model.weights.values())
    peak, few = (harness.peak_extra(lambda n=n: population.round(n)) for n in (updates, updates // 10))
    harness.report(
        f"{updates} updates of {name}: peak memory",
        ratio=peak / one,
        against="bytes of a model of each type",
        limit=SLACK * MODELS,
        ratio_of_a_tenth_of_the_updates=few / one,
    )


def bench_speed(name: str, population: Population, repeats: int) -> None:
    """Adding one update to the mean of its type, against one flat tensor of the same size."""
    for type_of, model in population.models.items():
        update, mean = population.tensors(type_of, 1.0), WeightedMean()
        size = sum(value.numel() for value in model.weights.values())
        flat, other = torch.zeros(size), torch.ones(size)
        mean.add(update, SAMPLES)  # the first is only copied
        works: dict[str, harness.Work] = {
            "ours": lambda mean=mean, update=update: mean.add(update, SAMPLES),
            "flat": lambda flat=flat, other=other: flat.lerp_(other, 0.1),
        }
        times = harness.interleaved(works, repeats)
        harness.report(
            f"an update of {name}, {type_of}: time",
            ratio=times["ours"].cpu / times["flat"].cpu,
            against="lerp_ on one flat tensor, CPU time",
            limit=TIME_LIMIT,
        )


def main() -> None:
    """Run all."""
    quick = harness.parsed(harness.parser(__doc__)).quick
    types = ("image",), ("text",), ("image", "text")
    populations = {
        "one type": Population(ByType(), types[0]),
        "three types": Population(CollaborativeAveraging(), *types),
    }
    for name, population in populations.items():
        bench_memory(name, population, 20 if quick else 100)
        bench_speed(name, population, 5 if quick else 15)


if __name__ == "__main__":
    main()
