"""Comparison of results before and after a change: metrics, ledgers and weights of short runs, bit for bit.

    python benchmarks/bits.py record before.json                 # on the old commit
    python benchmarks/bits.py compare before.json                # on the new one; exit status 1 if anything differs
    python benchmarks/bits.py compare before.json --only scenes-demo --engines local serialized

Every case below, a preset or a method on its federation, runs for two rounds on a few generated scenes in place of its
data, and on small pretrained networks drawn at random in place of its weights, on one thread. All run on the local
engine, and again with each message encoded; those in ``DISTRIBUTED`` also on Ray and on Flower. Compared are
the measurements, messages and weights of a run, not the layout of its folder, which ``digests`` alone reads. No case
clips outlying updates, as that has a default of its own.

After a commit for which `compare` finds a difference, records of studies are run again cell by cell
(`scripts/confirm.py`): rows that it concerns are hidden and queued.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from polyfed import Experiment, run
from polyfed.core.errors import PolyfedError

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "local": {"name": "local"},
    "serialized": {"name": "local", "serialize": True},
    "ray": {"name": "ray", "workers": 2},
    "flower": {"name": "flower", "nodes": 2},
}
DISTRIBUTED = ("scenes-demo", "fedaid-scenes", "transfer-scaffold", "exchange-fedgems", "secure-sums", "adapters-flora")

_SIZES = "train: 96, validation: 16, test: 16, difficulty: 0.0, size: 32"
_PAIRS = f"{{name: scenes, {_SIZES}, columns: {{image: image, text: captions}}, targets: {{label: label}}}}"
_PICTURES = f"{{name: scenes, {_SIZES}, seed: 1, columns: {{image: image}}, targets: {{label: label}}}}"
_TEXTS = f"{{name: scenes, {_SIZES}, seed: 2, columns: {{text: text}}, targets: {{label: topic}}}}"
RUN = (
    *("run.rounds=2", "run.eval_every=1", "run.evaluate_clients=1", "run.threads=1", "run.output.plots=false"),
    "aggregation.clip=null",
)
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
_PIXELS = "{name: pixels, size: 16}"
_TOKENS = "{name: tokens, length: 16, tokenizer: {name: hashing, size: 200}}"
_WORDS = "{name: bag, width: 16, view: {name: tokens, length: 16, tokenizer: wordpiece}}"
_GROUPED = f"{{name: resnet, widths: [8, 16], depths: [1, 1], norm: group, view: {_PIXELS}}}"
_HASHED = f"{{name: bag, width: 16, view: {_TOKENS}}}"
SMALL_MODELS = (
    f"server.model={{dim: 16, encoders: {{image: {_IMAGES}, text: {_WORDS}}}}}",
    f"clients.image.models=[{{dim: 16, encoders: {{image: {_IMAGES}}}}}]",
    f"clients.text.models=[{{dim: 16, encoders: {{text: {_WORDS}}}}}]",
    f"clients.paired.models=[{{dim: 16, encoders: {{image: {_IMAGES}, text: {_WORDS}}}}}]",
)
FEW_SCENES = ("data.sources.scenes.train=96", "data.sources.scenes.validation=16", "data.sources.scenes.test=32")

EXCHANGES = {  # on the data of fedafd-flickr8k, with models from scratch
    "exchange-creamfl": "{name: creamfl, local_epochs: 1, teacher: {weights: gca}}",
    "exchange-fedmd": "{name: fedmd, local_epochs: 1, public: {samples: 20}}",
    "exchange-fedgems": "{name: fedgems, local_epochs: 1}",
    "exchange-fedet": "{name: fedet, local_epochs: 1}",
    "exchange-fedmkd": "{name: fedmkd, local_epochs: 1, byol: {predictor_width: 8}}",
    "exchange-margin": "{name: margin_weighted, local_epochs: 1}",
    "exchange-change": "{name: change_distillation, local_epochs: 1, warmup_rounds: 0}",
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
    **{
        name: (f"algorithm={{name: {name}, local_steps: 2}}",)
        for name in ("fedavg", "fediot", "fedprox", "moon", "scaffold")
    },
    "creamfl": ("algorithm={name: creamfl_averaged, local_steps: 20}",),
    "fed-mae": ("algorithm={name: fed_mae, decoder_depth: 1, decoder_width: 64, decoder_heads: 4, local_steps: 2}",),
    "fedema": ("algorithm={name: fedema, byol: {predictor_width: 96}, local_steps: 2}", _AUGMENTED),
    "local": (
        "algorithm={name: local, local_steps: 2}",
        "clients.paired.test_split=test",
        "clients.paired.task.folds=[5, 1]",
    ),
}
_IN_STEPS = "local_steps: 2"
ADAPTERS = {  # ranks of the two models of paired clients
    **{name: (2, 2) for name in ("fedit", "ffa_lora", "fedex_lora")},
    **{name: (2, 3) for name in ("flora", "flexlora", "hetlora")},
}
NAMES = {  # adapters of images and of names of classes
    "fedclip": ("attention", "null"),
    "promptfl": ("null", "{name: prompts, length: 2}"),
}
_INCOMPLETE = "missing: {rates: {image: 0.3, text: 0.2}, test: true}"
_CLASSES = "task: {name: classification, target: label}, training: {batch_size: 8, optimizer: {kind: adam, lr: 0.01}}"
_MANY = tuple(f"clients.{group}.{key}" for group in ("image", "text", "paired") for key in ("count=3", "items=36"))
_UNSEEN = (*_MANY, "run.evaluate_clients=false", "privacy.secret=SECRET")
_DRAWN = "clients: {name: drawn, skew: 20}"
RUNS = {  # FedAvg on the data of fedcola-flickr8k, run otherwise
    "secure-sums": (*_MANY, "aggregation.secure=pairwise_masks"),
    "robust-median": (*_MANY, "aggregation.robust={name: median, tolerated: 1}"),
    "private-replies": (*_UNSEEN, "privacy.reply={weights: 1.0, noise_multiplier: 2.0}"),
    "private-samples": (
        "clients={image: {count: 2, source: cifar100, items: 48, "
        f"model: {{dim: 16, encoders: {{image: {_GROUPED}}}}}, {_CLASSES}}}}}",
        *("server=null", "public=null", "privacy.samples={noise_multiplier: 1.0}", *_UNSEEN[-2:]),
    ),
    "sent-as-float16": ("run.exchange.transport.dtype=float16",),
    "pace-buffered": (f"run.pace={{name: buffered, replies: 3, {_DRAWN}}}", "run.rounds=4"),
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


def _adapted(name: str, ranks: tuple[int, int]) -> Case:
    offset = str(name in ("flora", "fedex_lora")).lower()

    def model(rank: int, *modalities: str) -> str:
        adapter = f"adapter: {{name: lora, rank: {rank}, offset: {offset}}}"
        encoders = {
            "image": f"image: {{name: hf, weights: vit, view: {_PIXELS}, {adapter}}}",
            "text": f"text: {{name: hf, weights: bert, view: {_TOKENS}, {adapter}}}",
        }
        return f"{{dim: 16, encoders: {{{', '.join(encoders[modality] for modality in modalities)}}}}}"

    own, other = ranks
    return "fedcola-flickr8k", (
        *SMALL_DATA,
        "public=null",
        f"server.model={model(own, 'image', 'text')}",
        f"clients.image.models=[{model(own, 'image')}]",
        f"clients.text.models=[{model(own, 'text')}]",
        f"clients.paired.models=[{model(own, 'image', 'text')}, {model(other, 'image', 'text')}]",
        f"algorithm={{name: {name}, {_IN_STEPS}}}",
    )


def _by_names(name: str, image: str, text: str) -> Case:
    common = "name: hf, weights: clip, projection: own"
    encoders = f"image: {{{common}, tower: vision, view: {_PIXELS}, adapter: {image}}}, "
    encoders += f"text: {{{common}, tower: text, view: {_TOKENS}, adapter: {text}}}"
    task = "task: {name: classification, target: label, names: {template: 'a {}', temperature: 0.1}}"
    common = f"source: cifar100, model: {{dim: 8, encoders: {{{encoders}}}}}, {task}"
    training = "training: {batch_size: 8, optimizer: {kind: adam, lr: 0.01}}"
    clients = f"clients={{image: {{count: 2, items: 48, {common}, {training}}}}}"
    algorithm = f"algorithm={{name: {name}, {_IN_STEPS}}}"
    return "fedcola-flickr8k", (*SMALL_DATA, "public=null", f"server={{{common}}}", clients, algorithm)


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
    "transfer-centralised": (
        "fedcola-flickr8k",
        (
            *SMALL_DATA,
            *(f"clients.{group}.count=1" for group in ("image", "text", "paired")),
            f"algorithm={{name: centralised, {_IN_STEPS}}}",
        ),
    ),
    **{
        name: ("fedcola-flickr8k", (*SMALL_DATA, *settings, f"algorithm={{name: fedavg, {_IN_STEPS}}}"))
        for name, settings in RUNS.items()
    },
    **{f"adapters-{name}": _adapted(name, ranks) for name, ranks in ADAPTERS.items()},
    **{f"names-{name}": _by_names(name, *adapters) for name, adapters in NAMES.items()},
    "segmentation-scenes": (
        "segmentation-scenes",
        tuple(f"data.sources.{n}.{key}" for n in ("pictures", "texts", "pairs") for key in ("train=72", "test=16")),
    ),
    "four-modalities": (
        "four-modalities",
        (
            *(f"data.sources.{name}.{key}" for name in ("scenes", "alone") for key in ("train=96", "test=16")),
            *("public.items=24", "algorithm.warmup_rounds=0", "algorithm.local_epochs=1"),
        ),
    ),
}


def digests(folder: Path) -> dict[str, str]:
    """Digests of a run's measurements by type, of the bytes that crossed, and of the tensors of each saved model."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    kept = {"ledger": _hash(ledger)}
    for group in sorted({record["kind"] for record in metrics}):
        kept[f"metrics {group}"] = _hash(_measured(record) for record in metrics if record["kind"] == group)
    for path in sorted((folder / "models").rglob("*.safetensors")):
        kept[str(path.relative_to(folder))] = _hash(_tensors(path))
    return kept


def _measured(record: Mapping[str, Any]) -> list[Any]:
    """A measurement or event, without its wording."""
    participant = record.get("participant", record.get("party"))
    return [record["round"], participant, record.get("event"), record.get("metrics")]


def _tensors(path: Path) -> Iterator[list[Any]]:
    for name, value in load_file(path).items():
        yield [name, str(value.dtype), list(value.shape), hashlib.sha256(value.numpy().tobytes()).hexdigest()]


def _hash(records: Iterable[Any]) -> str:
    lines = sorted(json.dumps(record, sort_keys=True) for record in records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@functools.cache
def networks() -> Path:
    """A folder with a small ViT, BERT and CLIP in the layout of pretrained ones, and a secret for drawing noise."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="polyfed-bits-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    images = size | {"image_size": 16, "patch_size": 8}
    words = size | {"vocab_size": 200, "max_position_embeddings": 24}
    # texts have an end token, which also pads them
    towers = {"vision_config": images, "text_config": words | dict.fromkeys(("eos_token_id", "pad_token_id"), 0)}
    torch.manual_seed(0)
    vit = transformers.ViTModel(transformers.ViTConfig(**images), add_pooling_layer=False)
    bert = transformers.BertModel(transformers.BertConfig(**words))
    clip = transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=8))
    for name, model in {"vit": vit, "bert": bert, "clip": clip}.items():
        model.save_pretrained(folder / name)
    (folder / "secret").write_bytes(bytes(range(32)))
    (folder / "secret").chmod(0o600)
    return folder


def measure(name: str, engine: str) -> dict[str, str]:
    """Digests of a case on an engine, or the error that ended it."""
    preset, overrides = CASES[name]
    folders = (f"data.weights_dir={networks()}", f"run.engine={json.dumps(ENGINES[engine])}")
    overrides = tuple(setting.replace("SECRET", str(networks() / "secret")) for setting in overrides)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return digests(run(Experiment.load(preset, (*RUN, *overrides, *folders)), Path(folder) / "run").folder)
        except PolyfedError as error:
            return {"error": f"{type(error).__name__}: {error}"}


def planned(names: Iterable[str], engines: Iterable[str]) -> list[tuple[str, str]]:
    """Cases with the engines that run them."""
    pairs = [(name, engine) for name in names for engine in engines]
    return [(name, engine) for name, engine in pairs if engine in ("local", "serialized") or name in DISTRIBUTED]


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
    before = json.loads(options.file.read_text()) if options.what == "compare" else {}
    recorded, differing = dict[str, dict[str, str]](), 0
    for case, engine in keys:
        key, now = f"{case}/{engine}", measure(case, engine)
        verdict, recorded[key] = now.get("error", f"{len(now)} digests"), now
        if options.what == "compare":
            changed = [name for name in sorted({*now, *before[key]}) if now.get(name) != before[key].get(name)]
            verdict = f"DIFFERS in {', '.join(changed)}" if changed else "the same"
            differing += bool(changed)
        print(f"{key:40} {verdict}", flush=True)
    if options.what == "record":
        options.file.write_text(json.dumps(recorded, indent=1))
    else:
        print(f"{differing} of {len(keys)} runs differ" if differing else f"all {len(keys)} runs are the same")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
