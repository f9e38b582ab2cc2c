"""Experiments that cannot be: each is refused as soon as it can be known, with what is wrong, and leaves no folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.core.errors import ConfigError, PolyfedError
from polyfed.data.sources.scenes import Scenes
from polyfed.federation.data import OpenedData
from polyfed.federation.participant import Participant
from polyfed.models.model import ModelSettings
from polyfed.runs.experiment import Experiment
from polyfed.runs.loop import Loop
from small_federations import Config, aligned, pixels, three_kinds, tiny_experiment, topics, transformers

GONE = object()
"""In place of a value: the key is taken out."""


def tiny(**algorithm: Any) -> Config:
    return tiny_experiment() | {"algorithm": algorithm}


def single(**algorithm: Any) -> Config:
    """Each type has one client."""
    config = transformers(**algorithm)
    for group in config["clients"].values():
        group["count"] = 1
    return config


def with_another(build: Callable[..., Config], group: str, another: str, **algorithm: Any) -> Config:
    """A second group of the same clients."""
    config = build(**algorithm)
    config["clients"][another] = config["clients"][group]
    return config


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy with other values at dotted paths."""
    copied: Config = json.loads(json.dumps(config))
    for path, value in changes.items():
        *parents, key = path.split(".")
        place = copied
        for parent in parents:
            place = place[parent]
        place[key] = value
        if value is GONE:
            del place[key]
    return copied


def _dealt(group: str, partition: str, **settings: Any) -> Config:
    return {f"clients.{group}.partition": {"name": partition} | settings}


MAE = {"decoder_depth": 1, "decoder_width": 32, "decoder_heads": 2}
IMAGE_ONLY = {"server.model.encoders.text": GONE, "server.task": "classification"}
LABELS = {"task": {"name": "classification", "target": "label"}}
TEXT = transformers()["clients"]["text"]["model"]
SHALLOW, DEEP = (changed(TEXT, {"encoders.text.depth": depth}) for depth in (1, 3))
TWO_MODELS = {"clients.text.models": [DEEP, SHALLOW]}
PLAIN = {"server.model.aligner": GONE, "clients.hospital.model.aligner": GONE}
PICTURES = {
    "server": GONE,
    "clients.hospital.model.encoders.text": GONE,
    "clients.hospital.task": LABELS["task"],
    "data.sources.scenes.targets": {"label": "label"},
}
TEXTS_ALONE = {"clients.image": GONE, "clients.paired": GONE, "server": GONE}
MASKED = {"secure": "pairwise_masks"}
PICTURE = "clients.image.model.encoders.image"
LOW_RANK = {PICTURE: {"name": "hf", "weights": "vit", "adapter": {"name": "lora"}, "view": pixels()}}
RETRIEVAL = three_kinds()["server"]["task"]

fedcola, mae = partial(transformers, name="fedcola"), partial(transformers, name="fed_mae", **MAE)
averaged = partial(transformers, name="creamfl_averaged", contrast={"weight": 1.0, "batch_size": 30})
two_groups = partial(with_another, aligned, "hospital", "other")
centralised, fedmd = partial(single, name="centralised"), partial(three_kinds, name="fedmd")
BUFFERED = {"run.pace": {"name": "buffered", "replies": 2}}
OF_FEDAVG: tuple[tuple[Config, str], ...] = (
    # counts, and names of what is there
    ({"server.source": "scene"}, r"server: source 'scene' is not in data\.sources; did you mean 'scenes'"),
    ({"clients.image.test_split": "tset"}, r"source 'private': no split 'tset'; did you mean 'test'"),
    ({"clients.paired.count": 40}, r"clients\.paired\.count is 40, but there are 32 samples of 'scenes'"),
    ({"clients.image.items": 25}, r"clients\.image\.items is 25, but 'private' has 24"),
    ({"clients.paired.also": {"source": "private", "items": 30}}, r"clients\.paired\.also\.items is 30"),
    ({"clients.image.items": "public"}, r"items is public, but the public set is not of 'private' train"),
    ({"clients.image.also": "public", "public": GONE}, "also is public, but there is none"),
    ({"clients.paired.items": "public", "public": GONE}, "items is public, but the federation has no public"),
    ({"public.items": 49}, r"public\.items is 49, but 'scenes' has 48; lower it"),
    ({"server.expected_test_items": 1000}, "expected_test_items is 1000, but 'scenes' test has 12 items"),
    ({"clients.paired-0": tiny()["clients"]["image"]}, "two clients are called 'paired-0'"),
    ({"clients.server": tiny()["clients"]["image"]}, "a client cannot be called 'server'"),
    ({"clients.image.model.dim": 16}, r"equal .* public set: 'clients\.paired' has 8, 'clients\.image' has 16"),
    ({"data.sources.private.columns": {"text": "captions"}}, r"private\.columns has no 'image', which a model"),
    ({"clients.image.task": "retrieval"}, r"clients\.image\.task 'retrieval' needs 'text'"),
    ({"clients.image.task": LABELS["task"] | {"target": "topic"}}, r"target 'topic' is not among .*private .'label'"),
    (_dealt("image", "dirichlet", min_size=30), r"clients\.image\.partition 'dirichlet': min_size=30 .* are 24"),
    (_dealt("paired", "quantity", min_size=17), r"clients\.paired\.partition 'quantity': .*34 items, there are 32"),
    (_dealt("paired", "shards", total=3), r"partition 'shards': total=3, but 2 clients .* need 4"),
    (_dealt("paired", "shards", total=40), r"partition 'shards': 40 shards of only 32 items"),
    # who is asked
    ({"run.sampling": {"cohort": 9}}, r"run\.sampling\.cohort is 9, but there are 3 clients"),
    ({"run.exchange": {"min_clients": 4}}, r"run\.exchange\.min_clients is 4, but a round has 3 replies"),
    ({"run.exchange": {"phases": {"fit": {"min_clients": 4}}}}, r"run\.exchange\.phases\.fit\.min_clients is 4"),
    (BUFFERED | {"run.exchange": {"min_clients": 3}}, r"is 3, but a round has 2 replies"),
    (BUFFERED | {"run.exchange": {"phases": {"fit": {"min_clients": 3}}}}, r"phases\.fit\.min_clients is 3"),
    ({"run.output": {"keep_rounds": [1, 3]}}, "keep_rounds has 3, but there are 2 rounds"),
    ({"run.attackers": {"name": "sign_flip", "clients": ["paired-7"]}}, "no client is called 'paired-7'"),
    ({"run.attackers": {"name": "sign_flip", "groups": ["pairs"]}}, "no clients are called 'pairs'"),
    ({"run.pace": {"name": "buffered", "replies": 9}}, r"run\.pace\.replies is 9, but there are 3 clients"),
    # how clients are trained
    ({"clients.image.training.schedule": {"warmup": 3}}, r"schedule\.warmup is 3, but run\.rounds is 2"),
    # what protects replies
    ({"aggregation": {"secure": {"name": "pairwise_masks", "range": math.inf}}}, r"secure\.range: .*finite"),
    ({"aggregation": MASKED, "clients.image": GONE}, "needs 3 clients of a type, and type 'paired' has 2"),
    ({"aggregation": {"robust": "krum"}, "clients.image": GONE}, "needs 5 replies of it, and type 'paired' has 2"),
)
REFUSED: list[tuple[Config, Config, str]] = [
    # averages and who has what they average
    (
        three_kinds(name="fedafd"),
        {"clients.paired.task": LABELS["task"] | {"imputation": "nearest"}},
        r"clients\.paired\.task: imputation nearest looks .* set algorithm\.fusion=null",
    ),
    # centralised
    (
        centralised(),
        {"clients.text.count": 2, "clients.paired.count": 3},
        r"text \(2 clients\): set clients\.text\.count=1; paired \(3 clients\): set clients\.paired\.count=1",
    ),
    (centralised(), {"clients.text.count": 2, "clients.text.model": GONE} | TWO_MODELS, r"text \(2 clients\)"),
    (with_another(centralised, "text", "more"), {}, r"text\+more: leave one of text, more"),
    # what there is to train
    (tiny(name="fedema", task_weight=0.0, byol=None), {}, "nothing would be trained"),
    (mae(**MAE | {"decoder_heads": 5}), {}, "decoder_heads 5 does not divide decoder_width 32"),
    (mae(**MAE | {"decoder_width": 30}), {}, "multiple of 4"),
    # public sets and what they know
    (tiny(name="creamfl"), {"public": GONE}, "needs a public set"),
    (tiny(name="creamfl"), IMAGE_ONLY, r"'gca' contrasts modalities, but server\.model encodes"),
    (tiny(name="creamfl", teacher={"weights": "mean"}), IMAGE_ONLY, "contrasts between modalities need two"),
    (
        tiny(name="creamfl", teacher={"weights": "mean"}, contrast={"inter": None}),
        IMAGE_ONLY | {"public.unpaired": {"text": 2}},
        r"public\.unpaired\.text is 2, but server\.model has no 'text' encoder to learn from them with; valid: image",
    ),
    (averaged(), {}, "needs a public set"),
    (averaged(), {"public": {"source": "scenes"}, "server": GONE}, "needs a server model"),
    (
        averaged(),
        {
            "public": {"source": "scenes", "items": 6},
            "server.model": {"dim": 64, "encoders": transformers()["clients"]["image"]["model"]["encoders"]},
            "server.task": LABELS["task"],
        },
        "contrasts between modalities need two",
    ),
    (tiny(name="fedgems"), IMAGE_ONLY, r"fedgems matches modalities.*\['image'\]"),
    (
        tiny(name="creamfl", teacher={"alignment": {"kind": "procrustes", "penalty": 0.1}}),
        {},
        r"penalty 0\.1 is of ridge, but kind is procrustes",
    ),
    (tiny(name="creamfl", distiller={"temperature": 0.2}), {}, "temperature has no effect with loss l2"),
    # models with align modules
    *(
        (config, changes, message)
        for method in ("fedaid", "feddra")
        for config, changes, message in (
            (aligned(name=method), PLAIN, rf"'{method}' needs an align module for 'image'; set aligner"),
            (two_groups(name=method), {"clients.other.model.dim": 6}, "one model, .* clients of types hospital, other"),
            (aligned(name=method), PICTURES, "clients of 'hospital' have only 'image'"),
        )
    ),
    # the run
    (
        tiny(name="creamfl"),
        {"run.exchange": {"phases": {"fti": {"deadline": 3}}}},
        r"run\.exchange\.phases\.fti: 'creamfl': did you mean 'fit'\? valid: assess, assess_global, fit",
    ),
    *((tiny(name="fedavg"), *row) for row in OF_FEDAVG),
    (tiny(name="fedavg"), {"clients.image.training.batch_size": 1}, r"clients\.image\.training\.batch_size: .*2"),
    (tiny(name="scaffold"), {"run.pace": "buffered"}, "'buffered' does not go with algorithm 'scaffold'"),
    (
        tiny(name="change_distillation", warmup_rounds=2),
        {},
        r"warmup_rounds is 2, but run\.rounds is 2: no client would ever be asked; lower",
    ),
    # adapters
    *((tiny(name=name), {}, "no client's model has low-rank adapters") for name in ("fedit", "flora")),
    *(
        (tiny(name=name), {}, rf"trains adapters '{adapters}', and a model of clients\.paired has none")
        for name, adapters in (("fedclip", "attention"), ("promptfl", "prompts"))
    ),
    (tiny(name="flora"), LOW_RANK, "adds to layers for good, and clients of 'image' do not exchange that"),
]

OPENING, BUILDING, ROUND = "opening data", "building models", "a round"
REFUSED_LATER: dict[tuple[str, str], list[tuple[Config, Config, str]]] = {
    (OPENING, "test items or batches per client"): [
        (
            tiny(name="fedavg"),
            {"clients.paired.test": "dealt", "clients.paired.count": 10},
            r"clients\.paired\.test is dealt, but of 'scenes' test the clients would get",
        ),
        (
            tiny(name="fedavg"),
            {"clients.image.items": 1},
            r"clients\.image: 'image' has 1 training sample .*a batch of one is left out; raise items \(it is 1\)",
        ),
    ],
    (BUILDING, "samples of the public set"): [
        (fedmd(public={"samples": 999}), {"public.per_item": None}, r"public\.samples is 999, but the public set has")
    ],
    (BUILDING, "a server model without a type"): [
        (
            tiny(name="fedavg"),
            {"server.model.encoders.image.widths": [16, 8]},
            r"^server\.model must equal the model of one type",
        )
    ],
    (BUILDING, "layers of other shapes"): [
        (
            tiny(name="fedavg", averaging={"name": "by_slot", "layers": "encoder", "range": "modality"}),
            {"clients.image.model.encoders.image.widths": [16, 8]},
            r"'image/trunk' of clients paired-0, paired-1 cannot be averaged .* image:",
        ),
        (fedcola(), {"clients.text.model": DEEP}, r"'text/attention' .*text-0, text-1 cannot be averaged .* paired"),
        (
            fedcola(averaging="by_type"),
            {"clients.text.model": DEEP},
            r"slot 'image/\w+' of clients image .* averaged with slot 'text/\w+'",
        ),
    ],
    (BUILDING, "layers that no model has"): [
        (tiny(name="fediot"), {}, r"no client's model has such layers.*averaging\.layers=encoder"),
        (mae(task_weight=0.0), {}, r"patches of images, and text-0, text-1 cannot: .*, or set algorithm.task_weight"),
        (mae(), TEXTS_ALONE, r"text-0, text-1 cannot: .* at least two patches$"),
    ],
    (ROUND, "FedEMA without random views"): [
        (
            tiny(name="fedema", task_weight=0.0),
            {},
            r"task_weight is 0, .* view of paired-0, paired-1, image is random, so that",
        )
    ],
}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"


def refusal_ids(value: object) -> str:
    return value if isinstance(value, str) else ""


def steps_of_work(monkeypatch: pytest.MonkeyPatch, *, allowed: bool) -> list[str]:
    """Steps of a run in order: opening, building, training; or all of them are forbidden."""
    steps = ["loading"]

    def watched(owner: type, name: str, step: str) -> None:
        work = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            assert allowed, f"{step} before the refusal"
            steps.append(step)
            return work(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    watched(OpenedData, "split", OPENING)
    watched(OpenedData, "samples", OPENING)
    watched(ModelSettings, "build", BUILDING)
    watched(Loop, "round", ROUND)
    return steps


@pytest.mark.parametrize(("config", "changes", "message"), REFUSED, ids=refusal_ids)
def test_refusals_on_loading(monkeypatch: pytest.MonkeyPatch, config: Config, changes: Config, message: str) -> None:
    steps_of_work(monkeypatch, allowed=False)
    with pytest.raises(PolyfedError, match=message):
        Experiment.load(changed(config, changes))


@pytest.mark.parametrize(
    ("moment", "refusal", "config", "changes", "message"),
    [(*place, *row) for place, rows in REFUSED_LATER.items() for row in rows],
    ids=refusal_ids,
)
def test_data_and_models_are_refused_at_the_moment_that_the_reference_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, refusal: str, config: Config, changes: Config, message
) -> None:
    steps = steps_of_work(monkeypatch, allowed=True)
    with pytest.raises(ConfigError, match=message):
        polyfed.run(Experiment.load(changed(config, changes)), tmp_path / "runs" / "run", quiet=True)
    assert max(steps, key=["loading", OPENING, BUILDING, ROUND].index) == moment
    assert moment == ROUND or not (tmp_path / "runs").exists()
    (line,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {moment} |")]
    assert refusal in line


def test_a_run_refuses_what_was_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment that Python made is checked when it runs, as early."""
    steps_of_work(monkeypatch, allowed=False)
    config, changes, message = REFUSED[-1]
    with pytest.raises(ConfigError, match=message):
        polyfed.run(Experiment.parse(changed(config, changes)), tmp_path / "run", quiet=True)


class Sensors(Scenes):
    """A source outside polyfed, whose ``open`` may add targets to those that are named."""


@pytest.mark.parametrize("algorithm", ["fedit", "flora"])
def test_what_code_outside_polyfed_makes_is_judged_once_it_is_made(algorithm: str, tmp_path: Path) -> None:
    view = {"name": "tokens", "length": 16, "tokenizer": {"name": "hashing", "size": 50}}
    text = {"name": "fixed_features.UntrainedBag", "width": 8, "view": view}
    config = changed(topics(name=algorithm), {"clients.text.model": {"dim": 8, "encoders": {"text": text}}})
    experiment = Experiment.load(config)
    with pytest.raises(ConfigError, match="adapter"):
        polyfed.run(experiment, tmp_path / "run", quiet=True)
    assert Scenes(targets={"topic": "topic"}).target_names == ("topic",)
    assert Sensors(targets={"topic": "topic"}).target_names is None


def test_participants_without_a_step_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Participant, "batches", lambda *args, **more: iter(()))
    config = changed(tiny(name="fedavg"), {"run.rounds": 2})
    polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    reported = [message for message in caplog.messages if "made no step of its optimiser in round 1" in message]
    assert sorted(message.split()[0] for message in reported) == ["image", "paired-0", "paired-1"]
    assert not any("in round 2" in message for message in caplog.messages)
    caplog.clear()
    monkeypatch.undo()
    idle = config | {"algorithm": {"name": "server_only", "server_epochs": 0}}
    polyfed.run(Experiment.parse(idle), tmp_path / "other")
    assert not any("made no step" in message for message in caplog.messages)
