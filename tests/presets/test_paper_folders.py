"""Presets at the papers' sizes read folders of the layouts that they name: here tiny ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paper_folders import ASKED, CAPTIONED, KARPATHY, LABELLED, paper_folders

from polyfed import Experiment, run
from polyfed.data.assembly import assemble
from polyfed.data.sources.questions import OTHER
from polyfed.data.view import DataContext
from polyfed.data.views.tokens import Tokens
from polyfed.lab.analysis.partition import planned_holdings
from polyfed.runs.config_files import merged, read_config
from small_federations import bag, resnet, words

HUB = {"question": "question", "of": {"path": "vqa_v2_hub", "id": "question_id", "columns": {"text": "question"}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paper_folders(tmp_path_factory.mktemp("data"))


def opened(preset: str, source: str, split: str, folders: Path) -> Any:
    return Experiment.load(preset).data.sources[source].open(split, name=source, data_dir=folders)


@pytest.mark.parametrize("preset", ["creamfl-paper-scale", "fedafd-paper-scale", "fedcola-coco-paper-scale"])
def test_karpathys_coco_trains_on_restval_too_and_has_five_captions(preset: str, folders: Path) -> None:
    sizes = {"train": KARPATHY["train"] + KARPATHY["restval"], "validation": KARPATHY["val"], "test": KARPATHY["test"]}
    for split, items in sizes.items():
        coco = opened(preset, "coco", split, folders)
        assert len(coco) == items
        captions = coco.modality("text").values.to_pylist()
        assert [len(texts) for texts in captions] == [5] * items
        assert captions[0][4].endswith("0 caption 4")
    ids = [set(opened(preset, "coco", split, folders).ids) for split in sizes]
    assert not set.intersection(*ids)
    assert {"train-29", "restval-9"} < ids[0]


@pytest.mark.parametrize(
    ("preset", "paired", "pairs"),
    [
        ("creamfl-paper-scale", "flickr30k", CAPTIONED["train"]),
        ("fedafd-paper-scale", "flickr30k", CAPTIONED["train"]),
        ("fedcola-paper-scale", "flickr30k", 150),
        ("fedcola-coco-paper-scale", "coco", 36),
        ("vqa-v2", "flickr30k", CAPTIONED["train"]),
    ],
)
def test_items_are_dealt_out(preset: str, paired: str, pairs: int, folders: Path) -> None:
    content = read_config(preset)
    content["data"]["dir"] = str(folders)
    for group in ("image", "text"):
        content["clients"][group]["partition"]["min_size"] = 1
    if content.get("public"):
        content["public"]["items"] = 10
    if preset.startswith("fedcola"):
        content["clients"]["paired"]["items"] = pairs
    if preset.startswith("fedafd"):
        content["clients"]["paired"]["partition"] = {"name": "shards", "per_client": 2, "total": 8}
    holdings = planned_holdings(Experiment.parse(content)).holdings
    held = {
        group: [h.items for client, h in holdings.items() if client.startswith(group)] for group in content["clients"]
    }
    assert sum(held["image"]) == sum(held["text"]) == LABELLED["train"]
    assert {holding.source for client, holding in holdings.items() if client.startswith("paired")} == {paired}
    # each of FedCola's 8 clients drops up to 5 % of its images, here one
    assert sum(held["paired"]) == pairs - (8 if preset.startswith("fedcola") else 0)


def asked(settings: dict[str, Any], split: str, folders: Path) -> tuple[Any, Any]:
    content = merged(read_config("vqa-v2")["data"]["sources"]["vqa_v2"], settings)
    content = {"data": {"sources": {"vqa": content}, "dir": str(folders)}}
    source = Experiment.load("vqa-v2").data.model_validate(content["data"]).sources["vqa"]
    table = source.open(split, name="vqa", data_dir=folders)
    view = Tokens.model_validate({"tokenizer": "hashing"})
    return table, assemble(table, {"text": view}, DataContext(folders.parent / "cache"))


def test_both_layouts_of_vqa_v2_have_the_same_questions_and_votes(folders: Path) -> None:
    for split, images in ASKED.items():
        (nested, ours), (flat, hubs) = (asked(settings, split, folders) for settings in ({}, HUB))
        assert (len(nested), len(flat)) == (images, 2 * images)
        assert nested.classes == flat.classes
        assert nested.classes["answer"][-1] == OTHER
        assert nested.classes["kind"] == ("yes_no", "number", "other")
        assert ours.targets["votes"].shape == (2 * images, 10)
        for target, values in ours.targets.items():
            assert values.tolist() == hubs.targets[target].tolist(), target


def test_votes_are_classes_of_each_annotators_answer(folders: Path) -> None:
    table, samples = asked({"most": 3}, "train", folders)
    assert table.classes["answer"] == ("yes", "0", "1", OTHER)  # of 12 images 4 each have most votes for 0, 1 and 2
    assert samples.targets["votes"][2:4].tolist() == [[0] * 9 + [3], [2] * 6 + [3] * 4]


def test_a_server_for_vqa_v2_runs_and_reports_soft_accuracy(folders: Path, tmp_path: Path) -> None:
    content = read_config("vqa-v2")
    content["data"]["dir"] = str(folders)
    image, text = resnet(), bag(words(16, 500))
    encoders = {"image": {"image": image}, "text": {"text": text}, "paired": {"image": image, "text": text}}
    for group, own in encoders.items():
        client = content["clients"][group]
        client |= {"count": 1, "partition": "iid", "items": 12, "test_items": 10}
        client["model"] = {"dim": 8, "encoders": own}
        client["training"] = {"batch_size": 8, "optimizer": {"lr": 0.01}}
    content["server"]["model"] = {"dim": 8, "encoders": encoders["paired"]}
    content["server"]["task"]["hidden"] = 8
    content["public"]["items"] = 10
    content["run"] = {"rounds": 1, "threads": 1, "output": {"plots": False}}
    content["algorithm"]["local_epochs"] = 1
    content["algorithm"]["contrast"]["batch_size"] = 5
    result = run(Experiment.parse(content), tmp_path / "run")
    metrics = result.metrics("server")
    assert {"soft_accuracy", "soft_accuracy_yes_no", "soft_prior", "soft_accuracy_number", "prior"} <= set(metrics)
    assert metrics["n"] == 2 * ASKED["validation"]
    # every image has 7 to 10 "yes", and always answering yes is right for half of the questions
    assert (metrics["prior"], metrics["soft_prior"]) == (50, 50)
    assert metrics["accuracy"] <= metrics["soft_accuracy"]
    assert result.records.config["server"]["task"]["votes"] == "leave_one_out"
