"""Cost of secure aggregation over sums in the clear: bytes and time, for ten clients and replies of ten megabytes.

Limit: a round of FedAvg takes at most 1.3 x the bytes and 1.3 x the time of one in the clear, with a pass of local
training over ``--samples`` texts per client. The ratio of the arithmetic alone is printed first.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import federations
import harness
import numpy as np
import torch

import polyfed
from polyfed import Experiment
from polyfed.aggregation.mean import WeightedMean
from polyfed.privacy.masking.party import Party, Unmasking, context_of
from polyfed.privacy.secure_sum import FixedPoint, PairwiseMasks, total

LIMIT = 1.3


def experiment(secure: str | None, clients: int, megabytes: float, samples: int) -> Experiment:
    """Clients that classify texts by topic, with a table of words of so many megabytes."""
    view = {"name": "tokens", "length": 16, "tokenizer": {"name": "hashing", "size": int(megabytes * 1e6 / 4 / 100)}}
    texts: dict[str, Any] = {"name": "scenes", "train": clients * samples, "validation": 8, "test": 8, "size": 16}
    texts |= {"columns": {"text": "text"}, "targets": {"topic": "topic"}}
    model = {"dim": 16, "encoders": {"text": {"name": "bag", "width": 100, "view": view}}}
    content = federations.classification(
        {"texts": texts},
        {"count": clients, "model": model, "task": {"name": "classification", "target": "topic"}},
        {"optimizer": {"kind": "sgd", "lr": 0.1}, "batch_size": 16},
        {"name": "fedavg", "local_epochs": 1},
    )
    serialized = {"name": "local", "serialize": True}
    content["run"] |= {"rounds": 3, "eval_every": 1, "evaluate_clients": 3, "engine": serialized}
    return Experiment.parse(content | {"aggregation": {"secure": secure}})


def rounds(clients: int, megabytes: float, samples: int) -> None:
    """Bytes and time of complete runs, which differ in nothing else."""
    bytes_of, seconds = dict[str, int](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("warm", "plain", "masked"):
            settings = experiment("pairwise_masks" if name == "masked" else None, clients, megabytes, samples)
            started = time.process_time()
            run = polyfed.run(settings, Path(folder) / name, quiet=True)
            seconds[name] = time.process_time() - started
            bytes_of[name] = run.records.total_bytes()
    ratios = bytes_of["masked"] / bytes_of["plain"], seconds["masked"] / seconds["plain"]
    for what, ratio in zip(("bytes", "time"), ratios, strict=True):
        harness.report(
            f"masked sums, {clients} clients, {megabytes:g} MB, {samples:,} texts each: {what}",
            ratio=ratio,
            against="the same run in the clear",
            limit=LIMIT,
        )


def sums(clients: int, megabytes: float, repeats: int) -> None:
    """Time of the arithmetic alone, against a mean of the same numbers."""
    length, numbers, rule = int(megabytes * 1e6 / 4), FixedPoint(), PairwiseMasks()
    tensors = [torch.randn(length) for _ in range(clients)]

    def plain() -> object:
        mean = WeightedMean()
        for tensor in tensors:
            mean.add({"w": tensor}, 1.0)
        return mean.result()

    def laid_out() -> list[Any]:
        return [numbers.encoded(tensor.numpy(), 1 / clients) for tensor in tensors]

    def unmasked() -> object:
        return numbers.mean(total(laid_out()), 1.0, np.dtype(np.float32))

    def masked(gone: int = 0) -> object:
        context = context_of("benchmark", 1)
        group = {f"c{k}": Party(f"c{k}", context) for k in range(clients)}
        members = {name: party.public for name, party in group.items()}
        made = {name: party.shares(members, rule.required) for name, party in group.items()}
        for name, party in group.items():
            party.receive({other: own[name] for other, own in made.items() if other != name}, rule.required)
        left = list(group)[gone:]
        words = total([group[name].masked(own) for name, own in zip(left, laid_out()[gone:], strict=True)])
        shares = {name: group[name].opened(left, rule.required) for name in left}
        summed = Unmasking(context, members, list(group), rule.required(clients)).sum(words, left, shares)
        return numbers.mean(summed, len(left) / clients, np.dtype(np.float32))

    works: dict[str, harness.Work] = {"plain": plain, "unmasked": unmasked, "masked": masked}
    works["masked, two gone"] = lambda: masked(2)
    times = harness.interleaved(works, repeats)
    for name in ("unmasked", "masked", "masked, two gone"):
        harness.report(
            f"a sum alone, {clients} clients, {megabytes:g} MB, {name}",
            ratio=times[name].cpu / times["plain"].cpu,
            against="a weighted mean in the clear, CPU time",
            seconds=times[name].cpu,
        )


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--samples", type=int, nargs="+", default=[200, 2000], help="per client, in one pass per round")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sums(arguments.clients, arguments.megabytes, 1 if arguments.quick else 3)
    for samples in arguments.samples:
        rounds(arguments.clients, arguments.megabytes, samples)


if __name__ == "__main__":
    main()
