"""Experiments that cannot be: each is refused before any work starts, with what is wrong, and leaves no folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.algorithms.fed_mae import FedMAE
from polyfed.core.errors import ConfigError
from polyfed.runs.config_files import merged
from polyfed.runs.experiment import Experiment
from small_federations import (
    Config,
    aligned,
    classifiers,
    one_classification,
    three_kinds,
    tiny_experiment,
    transformers,
    unlabelled,
)

GONE = object()
"""In place of a value: the key is taken out."""


def tiny(**algorithm: Any) -> Config:
    return tiny_experiment() | {"algorithm": algorithm}


def tiny_unlabelled(**algorithm: Any) -> Config:
    return unlabelled(tiny_experiment()) | {"algorithm": algorithm}


def scores(**algorithm: Any) -> Config:
    return one_classification(three_kinds(**merged({"name": "fedmd", "public": {"form": "scores"}}, algorithm)))


def scores_unlabelled(**algorithm: Any) -> Config:
    config = scores(task=None, **algorithm)
    sources = config["data"]["sources"]
    sources["unlabelled"] = sources["scenes"] | {"seed": 7, "targets": {"topic": "topic"}}
    config["public"] |= {"source": "unlabelled"}
    return config


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
        if value is GONE:
            del place[key]
        else:
            place[key] = value
    return copied


ACROSS = {"name": "by_slot", "layers": "encoder", "range": "modality"}
MAE = {"decoder_depth": 1, "decoder_width": 32, "decoder_heads": 2}
DEFAULTS = {name: FedMAE.model_fields[name].default for name in MAE}
IMAGE_ONLY = {"server.model.encoders.text": GONE, "server.task": "classification"}
LABELS = {"task": {"name": "classification", "target": "label"}}
TEXT = transformers()["clients"]["text"]["model"]
SHALLOW, DEEP = (changed(TEXT, {"encoders.text.depth": depth}) for depth in (1, 3))
PLAIN = {"server.model.aligner": GONE, "clients.hospital.model.aligner": GONE}
PICTURES = {
    "server": GONE,
    "clients.hospital.model.encoders.text": GONE,
    "clients.hospital.task": LABELS["task"],
    "data.sources.scenes.targets": {"label": "label"},
}
RETRIEVAL = three_kinds()["server"]["task"]

fedcola, mae = partial(transformers, name="fedcola"), partial(transformers, name="fed_mae", **MAE)
averaged = partial(transformers, name="creamfl_averaged", contrast={"weight": 1.0, "batch_size": 30})
centralised, fedmd = partial(single, name="centralised"), partial(three_kinds, name="fedmd")
REFUSED: list[tuple[Config, Config, str]] = [
    # averages and who has what they average
    (
        tiny(name="fedavg"),
        {"server.model.encoders.image.widths": [16, 8]},
        r"server\.model must be the model of one type",
    ),
    (
        tiny(name="fedavg", averaging=ACROSS),
        {"clients.image.model.encoders.image.widths": [16, 8]},
        r"'image/trunk' of clients paired-0, paired-1 cannot be averaged .* image:",
    ),
    (
        three_kinds(name="fedafd"),
        {"clients.paired.task": LABELS["task"] | {"imputation": "nearest"}},
        r"clients\.paired\.task: imputation nearest looks .* set algorithm\.fusion=null",
    ),
    (tiny(name="fediot"), {}, r"no client's model has such layers.*averaging\.layers=encoder"),
    *(
        (transformers(name=name, averaging={"name": name, key: value}), {}, rf"algorithm\.averaging\.{key}: {message}")
        for name in ("fediot", "fedcola")
        for key, value, message in (
            ("factor", 0, "Input should be greater than 0"),
            ("factor", -1.0, "Input should be greater than 0"),
            ("range", "world", "Input should be 'modality' or 'all'"),
            ("layers", "atention", "Input should be 'attention', 'mlp'"),
        )
    ),
    (fedcola(complement={"layers": "norms"}), {}, r"complement.layers: Input should be 'attention', 'mlp' or 'blocks'"),
    (
        fedcola(),
        {"clients.text.model": DEEP},
        r"'text/attention' of clients text-0, text-1 cannot be averaged .* paired",
    ),
    (
        fedcola(averaging="by_type"),
        {"clients.text.model": DEEP},
        r"slot 'image/\w+' of clients image cannot be averaged with slot 'text/\w+'",
    ),
    # centralised
    (
        centralised(),
        {"clients.text.count": 2, "clients.paired.count": 3},
        r"text \(2 clients\): set clients\.text\.count=1; paired \(3 clients\): set clients\.paired\.count=1",
    ),
    (
        centralised(),
        {"clients.text.count": 2, "clients.text.model": GONE, "clients.text.models": [DEEP, SHALLOW]},
        r"text \(2 clients\)",
    ),
    (with_another(centralised, "text", "more"), {}, r"text\+more: leave one of the groups text, more"),
    (centralised(averaging="by_type"), {}, "unknown key 'averaging'"),
    # what there is to train
    (tiny(name="fedema", task_weight=0.0, byol=None), {}, "nothing to train"),
    (mae(task_weight=0.0), {}, r"patches of pictures, and text-0, text-1 cannot: .*, or set algorithm.task_weight"),
    (
        mae(),
        {"clients.image": GONE, "clients.paired": GONE, "server": GONE},
        r"text-0, text-1 cannot: .* at least two patches$",
    ),
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
            "server.model": {"dim": 96, "encoders": transformers()["clients"]["image"]["model"]["encoders"]},
            "server.task": LABELS["task"],
        },
        "contrasts between modalities need two",
    ),
    *(
        (transformers(name="creamfl_averaged", **{section: {key: value}}), {}, rf"algorithm\.{section}.*{key}")
        for section, key, value in (
            ("contrast", "weight", -1),
            ("contrast", "tau_inter", 0),
            ("distiller", "loss", "l3"),
            ("contrast", "intra", False),
        )
    ),
    (
        tiny_unlabelled(name="fedgems", public={"form": "scores"}),
        {},
        "asks who is right, but the public set has no classes",
    ),
    (
        tiny_unlabelled(name="fedgems"),
        {},
        r"fedgems with public.form: representations matches modalities.*\['image'\]",
    ),
    (
        tiny_unlabelled(name="fedet", public={"form": "scores"}),
        {},
        r"algorithm\.task: the public set lacks the classes",
    ),
    (fedmd(distiller={"loss": "kl"}), {}, r"distiller\.loss is kl, which compares class scores, not representations"),
    (
        scores(distiller={"loss": "similarity"}),
        {},
        r"distiller\.loss is similarity, which compares representations, not scores; choose kl",
    ),
    (
        scores(teacher={"alignment": {"kind": "ridge"}}),
        {},
        r"teacher\.alignment is of representations",
    ),
    (
        tiny(name="creamfl", teacher={"alignment": {"kind": "cca"}}),
        {},
        r"algorithm\.teacher\.alignment\.kind: .*'procrustes' or 'ridge'",
    ),
    (
        tiny(name="creamfl", teacher={"alignment": {"kind": "procrustes", "penalty": 0.1}}),
        {},
        r"penalty 0\.1 is of ridge, but kind is procrustes",
    ),
    (tiny(name="creamfl", distiller={"temperature": 0.2}), {}, "temperature has no effect with loss l2"),
    (fedmd(digest={"loss": "kl"}), {}, r"digest\.loss is kl, which compares class scores"),
    (fedmd(public={"samples": 17}), {}, r"public\.samples is 17, but the public set has 16"),
    (fedmd(first_public={"epochs": 1}), {}, r"algorithm\.first_public: .* needs public.form: scores and labels"),
    (
        scores(),
        {"clients.paired.task": RETRIEVAL},
        "public.form is scores, but client 'paired-0' has the task 'retrieval'",
    ),
    (scores(), {"server.task": RETRIEVAL}, "public.form is scores, but the task of 'server' is 'retrieval'"),
    (scores_unlabelled(first_public={"epochs": 1}), {}, "it needs public.form: scores and labels"),
    (
        scores_unlabelled(teacher={"weights": "sed"}),
        {},
        "teacher.weights 'sed' weighs scores by the true class, which the public set lacks",
    ),
    # settings that a method does not have
    *(
        (tiny(name=name), {f"algorithm.{key}": value}, f"unknown key '{key}'")
        for name, key, value in (
            ("fedgems", "task", None),
            ("fedet", "kd_weight", 2.0),
            ("fedmkd", "teacher", {"weights": "sed"}),
        )
    ),
    # models with align modules
    *(
        (config, changes, message)
        for method in ("fedaid", "feddra")
        for config, changes, message in (
            (aligned(name=method, averaging="by_type"), {}, "unknown key 'averaging'"),
            (aligned(name=method), PLAIN, rf"'{method}' needs an align module for 'image'; set aligner"),
            (
                with_another(aligned, "hospital", "other", name=method),
                {"clients.other.model.dim": 6},
                "trains one model, but there are clients of types hospital, other",
            ),
            (aligned(name=method), PICTURES, "clients of 'hospital' have only 'image'"),
        )
    ),
    # prototypes
    (classifiers(shared={"txt": "things"}), {}, r"algorithm\.shared names 'txt'.*did you mean 'text'"),
    (classifiers(shared={"text": "a:b"}), {}, "shared"),
    # the run
    (
        tiny(name="creamfl"),
        {"run.phases": {"fti": {"deadline": 3}}},
        r"run\.phases\.fti: 'creamfl': did you mean 'fit'\? valid: assess, assess_global, fit",
    ),
]


@pytest.mark.parametrize(
    ("config", "changes", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_experiment_that_cannot_be_is_refused(tmp_path: Path, config: Config, changes: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        polyfed.run(Experiment.parse(changed(config, changes)), tmp_path / "runs" / "run", quiet=True)
    assert not (tmp_path / "runs").exists()
