"""Items that lack a modality and are kept: empty cells of tables, pictures without captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from item_tables import context_of, picture
from polyfed.core.errors import DataError
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.sources.parquet import Parquet
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens
from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment
from small_federations import tiny_experiment


def opened(folder: Path, columns: dict[str, list[Any]], **settings: Any) -> Samples:
    (folder / "set").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "set" / "train.parquet")
    named = {"columns": {"image": "image", "text": "text"}, "targets": {"label": "label"}} | settings
    split = Parquet(path="set", incomplete="keep", **named).open("train", name="s", data_dir=folder)
    views = {"image": Pixels(size=8), "text": Tokens(length=4, tokenizer={"name": "hashing", "size": 50})}
    return assemble(split, {name: views[name] for name in split.columns}, context_of(folder))


def rows(samples: Samples) -> dict[str, list[int]]:
    return {name: own.tolist() for name, own in samples.rows.items()}


PICTURES = [picture(k) for k in range(4)]


def test_an_empty_cell_is_a_modality_that_the_item_lacks(tmp_path: Path) -> None:
    cells = {
        "image": [PICTURES[0], None, PICTURES[2], None, PICTURES[3]],
        "text": ["one", "two", None, " ", ""],
        "label": [0, 1, 2, 3, 4],
    }
    samples = opened(tmp_path, cells)
    # the fourth has nothing; the others are numbered by what is there
    assert rows(samples) == {"image": [0, -1, 1, 2], "text": [0, 1, -1, -1]}
    assert samples.targets["label"].tolist() == [0, 1, 2, 4]
    full = opened(tmp_path, {"image": PICTURES[:4], "text": ["one", "two", "a", "b"], "label": [0, 1, 2, 3]})
    batch, other = samples.batch(torch.arange(4)), full.batch(torch.arange(4))
    assert torch.equal(batch.inputs["image"][[0, 2]], other.inputs["image"][[0, 2]])
    assert torch.equal(batch.inputs["text"][:2], other.inputs["text"][:2])
    assert batch.present["image"].tolist() == [True, False, True, True]
    assert not batch.inputs["image"][1].any()


def test_a_picture_without_captions_is_one_sample_and_a_blank_caption_none(tmp_path: Path) -> None:
    cells = {
        "image": [PICTURES[0], PICTURES[1], PICTURES[2], None],
        "text": [["a", "b"], [], ["c", ""], ["d", "e"]],
        "label": [0, 1, 2, 3],
    }
    samples = opened(tmp_path, cells)
    assert samples.items.tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert rows(samples) == {"image": [0, 0, 1, 2, 2, -1, -1], "text": [0, 1, -1, 2, -1, 3, 4]}


def test_targets_are_never_missing_and_lists_fit_where_both_are_there(tmp_path: Path) -> None:
    cells = {"image": [PICTURES[0], None], "text": ["one", "two"], "label": [None, 1]}
    samples = opened(tmp_path, cells)
    assert rows(samples) == {"image": [-1], "text": [0]}
    cells = {"image": [[PICTURES[0]], []], "text": [["a", "b"], ["c"]], "label": [0, 1]}
    with pytest.raises(DataError, match=r"item 0: .* hold lists of different length"):
        opened(tmp_path, cells)
    with pytest.raises(DataError, match="all 2 items are incomplete"):
        opened(tmp_path, {"image": pa.nulls(2, pa.binary()), "text": ["", None], "label": [0, 1]})


def test_public_items_lack_nothing_and_clients_keep_what_they_can_read(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    cells = {
        "image": [None if k % 3 == 0 else picture(k) for k in range(30)],
        "text": ["" if k % 3 == 1 else f"text {k}" for k in range(30)],
        "label": [k % 2 for k in range(30)],
    }
    for name in ("train", "validation", "test"):
        pq.write_table(
            pa.table(cells | {"key": [f"{name}{k}" for k in range(30)]}), tmp_path / "set" / f"{name}.parquet"
        )
    config = tiny_experiment()
    columns = {"columns": {"image": "image", "text": "text"}, "targets": {"label": "label"}}
    source = {"name": "parquet", "path": str(tmp_path / "set"), "id": "key", "incomplete": "keep", **columns}
    config["data"]["sources"] = {"scenes": source, "private": source | {"where": {"label": 0}}}
    config["data"]["cache_dir"] = str(tmp_path / "cache")
    config["public"]["items"] = 6
    config["clients"]["image"] |= {"split": "validation"}
    cfg = Experiment.parse(config)
    population = Population(cfg.data, cfg.public, cfg.server, cfg.clients, 0)
    public = population.public_samples(population.members["paired-0"].views)
    assert public is not None
    assert not any(bool((own < 0).any()) for own in public.rows.values())
    pictures = population.train(population.members["image"])
    assert len(pictures) == 10  # of 15 items with label 0, those with a picture
    assert not bool((pictures.rows["image"] < 0).any())
    held = population.holding(population.members["image"])
    assert (held["items"], held["samples"], held["unreadable"]) == (10, 10, 5)
    assert sum(held["labels"].values()) == len(held["index"]) == 10  # type: ignore[attr-defined, arg-type]
    assert "missing" not in held
    both = population.train(population.members["paired-0"])
    held = population.holding(population.members["paired-0"])
    lost = {name: int((both.rows[name] < 0).sum()) for name in ("image", "text")}
    assert held["missing"] == lost
    assert "unreadable" not in held
    assert {tuple((both.rows[name][k] >= 0).item() for name in ("image", "text")) for k in range(len(both))} >= {
        (True, False),
        (False, True),
    }


def test_what_takes_complete_samples_says_what_is_missing(tmp_path: Path) -> None:
    cells = {"image": [PICTURES[0], None], "text": ["one", "two"], "label": [0, 1]}
    samples = opened(tmp_path, cells)
    samples.require_all("text", "the probe")
    with pytest.raises(DataError, match="the probe: 1 of 2 samples have no 'image'; use complete ones"):
        samples.require_all("image", "the probe")


def test_an_item_without_a_list_of_answers_is_refused(tmp_path: Path) -> None:
    cells = {"image": [PICTURES[0], PICTURES[1]], "text": [["a"], []], "label": [[0], []]}
    with pytest.raises(DataError, match=r"item 1: .* empty list; fill it|item 1: .* lists of different length"):
        opened(tmp_path, cells)
