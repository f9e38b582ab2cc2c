from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image

from polyfed.reporting.page import html_report
from polyfed.reporting.run_figures import partition_sheet, run_figures
from polyfed.reporting.run_tables import classes_of, column_counts, partition_tables, short_names, sources_of
from polyfed.runs.records import PartitionEntry, RunRecords


def ill(edema: int, effusion: int, both: int, none: int, **more: object) -> PartitionEntry:
    """A client with so many items of each combination of two diseases."""
    labels = {
        "none": none,
        "mention_edema": edema,
        "mention_effusion": effusion,
        "mention_edema+mention_effusion": both,
    }
    items = edema + effusion + both + none
    columns = {
        "mention_edema": {"0": none + effusion, "1": edema + both},
        "mention_effusion": {"0": none + edema, "1": effusion + both},
    }
    found = {name: count for name, count in labels.items() if count}
    return PartitionEntry("reports", "notes", "train", items, items, found, columns=columns, **more)


@pytest.fixture
def held() -> dict[str, PartitionEntry]:
    test = {"split": "test", "items": 7, "labels": {"none": 7}, "index": []}
    return {"r-0": ill(3, 1, 2, 10, test=test, left_out={"text": 85}), "r-1": ill(0, 40, 0, 5, test=test)}


def test_tables_count_diseases_and_combinations(held):
    sizes, columns, classes = partition_tables(held)
    assert sizes.rows == [("r-0", "16", "16", "7"), ("r-1", "45", "45", "7")]
    assert sizes.notes == ("Left out of 'notes' train: 85 without text.",)
    assert columns.columns == ("", "r-0", "r-1", "all")
    assert columns.rows == [("edema", "5", "0", "5"), ("effusion", "3", "40", "43")]
    assert classes.rows == [
        ("none", "10", "5", "15"),
        ("edema", "3", "0", "3"),
        ("effusion", "1", "40", "41"),
        ("edema+effusion", "2", "0", "2"),
    ]


def test_many_clients_stand_one_below_the_other(held):
    many = {f"r-{k:02d}": held["r-0"] for k in range(13)}
    _, columns, _ = partition_tables(many)
    assert columns.columns == ("client", "edema", "effusion", "all")
    assert columns.rows[0] == ("r-00", "5", "3", "8")
    assert len(columns.rows) == 13


def test_values_of_other_columns_are_counted_by_name():
    labels = {"Italy / stage 1": 2, "Spain / stage 2": 1}
    columns = {"country": {"Italy": 2, "Spain": 1}, "stage": {"1": 2, "2": 1}}
    held = {"a": PartitionEntry("g", "s", "train", 3, 3, labels, columns=columns)}
    assert column_counts(held) == {"a": {"country Italy": 2, "country Spain": 1, "stage 1": 2, "stage 2": 1}}
    assert classes_of(held) == ["Italy / stage 1", "Spain / stage 2"]
    assert short_names(["country Italy"], held) == ["country Italy"]


def test_one_column_and_no_columns_have_no_table_by_column():
    one = {"a": PartitionEntry("g", "s", "train", 3, 3, {"Italy": 3}, columns={"country": {"Italy": 3}})}
    none = {"a": PartitionEntry("g", "s", "train", 3, 3, {"class 10": 1, "class 9": 2})}
    unlabelled = {"a": PartitionEntry("g", "s", "train", 3, 3)}
    assert [table.title for table in partition_tables(one)] == ["g: sizes", "g: items by class"]
    assert [row[0] for row in partition_tables(none)[1].rows] == ["class 9", "class 10"]
    assert [table.title for table in partition_tables(unlabelled)] == ["g: sizes"]
    assert partition_tables({}) == []


def test_a_map_of_shares_is_drawn_between_classes_and_sizes(held, tmp_path):
    classes, shares, bars, _ = partition_sheet(RunRecords(tmp_path, holdings=held)).draw().axes
    (image,) = shares.images
    expected = [[100 * 5 / 16, 100 * 3 / 16], [0.0, 100 * 40 / 45]]
    assert np.asarray(image.get_array()) == pytest.approx(np.array(expected))
    assert [text.get_text() for text in shares.texts] == ["5", "3", "0", "40"]
    assert [label.get_text() for label in shares.get_xticklabels()] == ["edema", "effusion"]
    assert [bar.get_width() for bar in bars.patches] == [16, 45]
    names = [label.get_text() for label in classes.get_xticklabels()]
    assert names == ["none", "edema", "effusion", "edema+effusion"]


def test_a_run_folder_with_columns_is_drawn_and_shown_on_the_page(held, tmp_path):
    entries = {client: {**asdict(holding), "index": []} for client, holding in held.items()}
    (tmp_path / "partition.json").write_text(json.dumps(entries))
    records = RunRecords.load(tmp_path)
    assert records.holdings["r-0"].columns == held["r-0"].columns
    (path,) = [sheet.save(tmp_path / "plot.png") for sheet in run_figures(records).values()]
    with Image.open(path) as image:
        assert image.format == "PNG"
    page = html_report(records)
    assert "reports: items by column" in page
    assert "edema+effusion" in page


def test_what_is_held_in_addition_is_said():
    also = {"public": True, "source": "coco", "split": "train", "items": 2, "samples": 4, "labels": None, "index": []}
    held = {name: PartitionEntry("pairs", "flickr", "train", 5, 19, also=also) for name in ("a", "b")}
    (sizes,) = partition_tables(held)
    assert sizes.notes == ("Counted above, but held in addition: 4 items, 8 samples of the public set, 'coco' train.",)
    assert sources_of(held) == ["flickr train", "+ coco train, public"]
