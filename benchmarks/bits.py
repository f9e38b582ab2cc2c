"""Whether a change of the code changes a result: metrics, ledgers and weights of short runs, bit for bit.

    python benchmarks/bits.py record before.json                 # on the old commit
    python benchmarks/bits.py compare before.json                # on the new one; exit status 1 if anything differs
    python benchmarks/bits.py compare before.json --only scenes-demo --engines local serialized

Every case below, a preset or a method on its federation, runs for two rounds on a few generated scenes in place of its
data, on one thread. All run on the local engine, and again with each message encoded; those in ``DISTRIBUTED`` also on
Ray and on Flower. What is compared is what a run measured, sent and learned, not how its folder is laid out: only
``digests`` knows that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from polyfed import Experiment, run

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "local": {"name": "local"},
    "serialized": {"name": "local", "serialize": True},
    "ray": {"name": "ray", "workers": 2},
    "flower": {"name": "flower", "nodes": 2},
}
DISTRIBUTED = ("scenes-demo", "fedaid-scenes", "transfer-scaffold", "exchange-fedgems")

_SIZES = "train: 96, validation: 16, test: 16, difficulty: 0.0, size: 32"
_PAIRS = f"{{name: scenes, {_SIZES}, columns: {{image: image, text: captions}}, targets: {{label: label}}}}"
_PICTURES = f"{{name: scenes, {_SIZES}, seed: 1, columns: {{image: image}}, targets: {{label: label}}}}"
_TEXTS = f"{{name: scenes, {_SIZES}, seed: 2, columns: {{text: text}}, targets: {{label: topic}}}}"
RUN = ("run.rounds=2", "run.eval_every=1", "run.evaluate_clients=1", "run.threads=1", "run.plots=false")
SMALL_DATA = (
    f"data.sources.flickr8k={_PAIRS}",
    f"data.sources.cifar100={_PICTURES}",
    f"data.sources.ag_news={_TEXTS}",
    *(f"clients.{group}.{key}" for group in ("image", "text", "paired") for key in ("count=2", "items=24")),
    *(f"clients.{group}.test_items=16" for group in ("image", "text")),
    "public={source: flickr8k, split: train, items: 24, per_item: 1}",
    "server.task={name: retrieval, objective: info_nce, mask_siblings: true}",
    "run.sampling={kind: uniform, cohort: null}",
)
_IMAGES = "{name: resnet, widths: [8, 16], depths: [1, 1], view: {name: pixels, size: 32, augment: {flip: true}}}"
_WORDS = "{name: bag, width: 16, view: {name: tokens, length: 16, tokenizer: wordpiece}}"
SMALL_MODELS = (
    f"server.model={{dim: 16, encoders: {{image: {_IMAGES}, text: {_WORDS}}}}}",
    f"clients.image.models=[{{dim: 16, encoders: {{image: {_IMAGES}}}}}]",
    f"clients.text.models=[{{dim: 16, encoders: {{text: {_WORDS}}}}}]",
    f"clients.paired.models=[{{dim: 16, encoders: {{image: {_IMAGES}, text: {_WORDS}}}}}]",
)
FEW_SCENES = (
    "data.sources.scenes.train=96",
    "data.sources.scenes.validation=16",
    "data.sources.scenes.test=32",
)

EXCHANGES = {  # on the data of fedafd-flickr8k, with models from scratch
    "exchange-creamfl": "{name: creamfl, local_epochs: 1, teacher: {weights: gca}}",
    "exchange-fedmd": "{name: fedmd, local_epochs: 1, public: {samples: 20}}",
    "exchange-fedgems": "{name: fedgems, local_epochs: 1}",
    "exchange-fedet": "{name: fedet, local_epochs: 1}",
    "exchange-fedmkd": "{name: fedmkd, local_epochs: 1, byol: {predictor_width: 8}}",
    "exchange-margin": "{name: margin_weighted, local_epochs: 1}",
    "exchange-fedproto": "{name: fedproto, local_epochs: 1}",
    "exchange-fedtgp": "{name: fedtgp, local_epochs: 1, server_epochs: 2}",
}
FEDAFD = {
    "fedafd-flickr8k": (),
    "fedafd-gca": ("algorithm.teacher.weights={name: gca, tau: 0.05}",),
    "fedafd-k10": ("algorithm.fusion.broadcast_every=10",),
    "fedafd-no-baa": ("algorithm.adversarial=null",),
    "fedafd-no-gff": ("algorithm.fusion=null",),
}
CREAMFL = {
    "creamfl-flickr8k": (),
    "reamfl-mean-flickr8k": (
        "algorithm={name: creamfl, local_epochs: 1, task: {order: joint}, contrast: null, teacher: {weights: mean}}",
    ),
    "server-only-flickr8k": ("algorithm=server_only", "run.evaluate_clients=false"),
    "local-flickr8k": ("algorithm={name: local, local_epochs: 1}",),
}
_AUGMENTED = "clients.image.models.0.encoders.image.view.augment={flip: true, crop: 0.5}"
TRANSFERS = {  # on the data of fedcola-flickr8k, with its models
    **{name: (f"algorithm={{name: {name}, local_steps: 2}}",) for name in ("fedavg", "fediot", "fedprox", "moon")},
    "scaffold": ("algorithm={name: scaffold, local_steps: 2}",),
    "creamfl": ("algorithm={name: creamfl_averaged, local_steps: 20}",),
    "fed-mae": ("algorithm={name: fed_mae, decoder_depth: 1, decoder_width: 64, decoder_heads: 4, local_steps: 2}",),
    "fedema": ("algorithm={name: fedema, byol: {predictor_width: 96}, local_steps: 2}", _AUGMENTED),
    "local": (
        "algorithm={name: local, local_steps: 2}",
        "clients.paired.test_split=test",
        "clients.paired.task.folds=[5, 1]",
    ),
}
_ALIGNED = (*FEW_SCENES, "algorithm.local_steps=2", "algorithm.teacher.steps=2")
_DEMO = (
    *FEW_SCENES,
    *(f"data.sources.{name}.{key}" for name in ("pictures", "texts") for key in ("train=96", "test=16")),
    "public.items=48",
    "server.model.encoders.image.widths=[8, 16, 32, 64]",
)

Case = tuple[str, tuple[str, ...]]
"""Preset and overrides."""


def _shrunk(preset: str, *more: str) -> Case:
    return preset, (*SMALL_DATA, *SMALL_MODELS, *more)


CASES: Mapping[str, Case] = {
    "scenes-demo": ("scenes-demo", _DEMO),
    "vqa-scenes": ("vqa-scenes", (*(f"data.sources.scenes.of.{key}" for key in ("train=96", "test=32")), *_DEMO[3:-1])),
    "fedaid-scenes": ("fedaid-scenes", _ALIGNED),
    "feddra-scenes": ("fedaid-scenes", (*FEW_SCENES, "algorithm={name: feddra, local_steps: 2, robust_steps: 2}")),
    **{name: _shrunk("creamfl-flickr8k", *settings) for name, settings in CREAMFL.items()},
    **{name: _shrunk("fedafd-flickr8k", *settings) for name, settings in FEDAFD.items()},
    **{name: _shrunk("fedafd-flickr8k", f"algorithm={settings}") for name, settings in EXCHANGES.items()},
    "fedcola-flickr8k": ("fedcola-flickr8k", (*SMALL_DATA, "algorithm.local_steps=2")),
    **{f"transfer-{name}": ("fedcola-flickr8k", (*SMALL_DATA, *settings)) for name, settings in TRANSFERS.items()},
}


def digests(folder: Path) -> dict[str, str]:
    """What a run left: each kind of measurement, the bytes that crossed, and the tensors of each saved model."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    kept = {"ledger": _hash(ledger)}
    for kind in sorted({record["kind"] for record in metrics}):
        kept[f"metrics {kind}"] = _hash(_measured(record) for record in metrics if record["kind"] == kind)
    for path in sorted((folder / "models").rglob("*.safetensors")):
        kept[str(path.relative_to(folder))] = _hash(_tensors(path))
    return kept


def _measured(record: Mapping[str, Any]) -> list[Any]:
    """A measurement or event, without the words in which it is told."""
    who = record.get("participant", record.get("party"))
    return [record["round"], who, record.get("event"), record.get("metrics")]


def _tensors(path: Path) -> Iterator[list[Any]]:
    for name, value in load_file(path).items():
        yield [name, str(value.dtype), list(value.shape), hashlib.sha256(value.numpy().tobytes()).hexdigest()]


def _hash(records: Iterable[Any]) -> str:
    lines = sorted(json.dumps(record, sort_keys=True) for record in records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def measure(name: str, engine: str) -> dict[str, str]:
    """Run a case on an engine."""
    preset, overrides = CASES[name]
    overrides = (*overrides, *RUN, f"run.engine={json.dumps(ENGINES[engine])}")
    with tempfile.TemporaryDirectory() as folder:
        return digests(run(Experiment.load(preset, overrides), Path(folder) / "run").folder)


def planned(names: Iterable[str], engines: Iterable[str]) -> list[tuple[str, str]]:
    """Cases and engines that go together."""
    pairs = [(name, engine) for name in names for engine in engines]
    return [(name, engine) for name, engine in pairs if engine in ("local", "serialized") or name in DISTRIBUTED]


def _told(key: tuple[str, str], judge: Callable[[dict[str, str]], str]) -> dict[str, str]:
    found = measure(*key)
    print(f"{'/'.join(key):40} {judge(found)}", flush=True)
    return found


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="ENGINE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keys = planned(options.only, options.engines)
    if options.what == "record":
        recorded = {"/".join(key): _told(key, lambda found: f"{len(found)} digests") for key in keys}
        options.file.write_text(json.dumps(recorded, indent=1))
        return 0
    before, differing = json.loads(options.file.read_text()), 0
    for key in keys:
        expected = before["/".join(key)]

        def judge(found: dict[str, str], expected: dict[str, str] = expected) -> str:
            changed = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
            return f"DIFFERS in {', '.join(changed)}" if changed else "the same"

        differing += _told(key, judge) != expected
    print(f"{differing} of {len(keys)} runs differ" if differing else f"all {len(keys)} runs are the same")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
