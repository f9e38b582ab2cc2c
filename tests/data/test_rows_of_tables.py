"""Several columns as one value, with statistics of the public set alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.assembly import assemble
from polyfed.data.source import Column, Split
from polyfed.data.sources.folder import Folder
from polyfed.data.sources.memory import Memory, register_data
from polyfed.data.view import DataContext, View
from polyfed.data.views.table import Cells, Table, cells_of

AGE, SEX = [20.0, 40.0, None, 60.0], ["F", "M", "M", None]


def column(stamp: str = "made", **columns: Sequence[Any]) -> Column:
    arrays = [pa.array(values) for values in columns.values()]
    return Column(pa.chunked_array([pa.StructArray.from_arrays(arrays, names=list(columns))]), stamp, "rows")


def context(tmp_path: Path, **public: Column) -> DataContext:
    return DataContext(tmp_path, public=public, bundles=tmp_path)


def test_a_row_is_standardised_numbers_and_places_of_names(tmp_path: Path) -> None:
    where = context(tmp_path, table=column(age=AGE, sex=SEX))
    x = Table().open(column(age=AGE, sex=SEX), "table", where)(torch.arange(4))
    high = 1.5**0.5  # 20, 40, 60 have the mean 40 and the deviation 20 sqrt(2 / 3)
    expected = [[1, -high, 1, 1, 0], [1, 0, 1, 0, 1], [0, 0, 1, 0, 1], [1, high, 0, 0, 0]]
    torch.testing.assert_close(x, torch.tensor(expected))
    assert Table().spec("table", where).shape == (5,)


def test_positions_have_a_column_each_and_none_for_a_missing_one(tmp_path: Path) -> None:
    view, where = Table(layout="positions"), context(tmp_path, table=column(age=AGE, sex=SEX))
    vector = Table().open(column(age=AGE, sex=SEX), "table", where)(torch.arange(4))
    x = view.open(column(age=AGE, sex=SEX), "table", where)(torch.arange(4))
    assert x.shape == (4, *view.spec("table", where).shape) == (4, 2, 5)
    assert torch.equal(x.sum(1), vector)
    assert (x != 0).any(-1).tolist() == [[True, True], [True, True], [False, True], [True, False]]


def test_statistics_are_those_of_the_public_set_whatever_is_opened(tmp_path: Path) -> None:
    where = context(tmp_path, table=column(age=AGE, sex=SEX))
    Table().spec("table", where)
    x = Table().open(column("others", age=[1000.0], sex=["X"]), "table", where)(torch.tensor([0]))
    assert x[0].tolist() == pytest.approx([1, 960 / (20 * (2 / 3) ** 0.5), 1, 0, 0], rel=1e-5)
    # a resumed run reads what the first round has learnt
    assert Table().spec("table", context(tmp_path, table=column(age=[1, 2], sex=["Y", "Z"]))).shape == (5,)


def test_what_is_given_needs_no_public_set(tmp_path: Path) -> None:
    view = Table.model_validate({"cells": {"age": {"mean": 10, "std": 2}, "grade": {"names": ["1", "2"]}}})
    x = view.open(column(age=[12, 8], grade=[2, 7]), "table", context(tmp_path))(torch.arange(2))
    assert x.tolist() == [[1, 1, 1, 0, 1], [1, -1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("values", "learnt"),
    [
        ([1.7e9 + k for k in range(100)], Cells(mean=1.7e9 + 49.5, std=(9999 / 12) ** 0.5)),
        ([0.1] * 3 + [None, float("inf")], Cells(mean=0.1)),
        ([None, float("nan")], Cells()),
        (["b", " ", "a", "", None], Cells(names=("a", "b"))),
        (pa.array(["b", None, "a", "b"]).dictionary_encode(), Cells(names=("a", "b"))),
    ],
)
def test_what_is_learnt_of_a_column(values: Sequence[Any], learnt: Cells, tmp_path: Path) -> None:
    result = cells_of({}, "table", context(tmp_path, table=column(x=values)))["x"]
    assert result.names == learnt.names
    assert (result.mean, result.std) == (pytest.approx(learnt.mean), pytest.approx(learnt.std))


def test_a_blank_name_is_not_known_and_categories_are_names(tmp_path: Path) -> None:
    view = Table(cells={"x": Cells(names=("a", "b"))})
    for values in (pa.array(["b", " ", None]), pa.array(["b", " ", None]).dictionary_encode()):
        x = view.open(column(x=values), "table", context(tmp_path))(torch.arange(3))
        assert x.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("view", "public", "opened", "message"),
    [
        (Table(), None, {"age": [1]}, "view 'table' learns from the public set, which has no 'm' .*set its cells"),
        (Table(), {"age": [1]}, {"sex": ["F"]}, "cells for the columns age, in this order; 'sex' does not fit"),
        (Table(), {"age": [1]}, {"age": ["old"]}, "'age' holds string, not numbers"),
        (Table(), {"age": [[1]]}, {"age": [[1]]}, "'age' holds list.*a table has one value per item"),
        (Table(), {"id": [str(k) for k in range(101)]}, {"id": ["1"]}, "101 distinct texts, and 1 to 100 can be names"),
        (Table(), {"day": [b"x"]}, {"day": [b"x"]}, "holds binary; a table has numbers"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, view: View, public: dict[str, Any] | None, opened: dict[str, Any], message: str
) -> None:
    where = context(tmp_path, **({} if public is None else {"m": column(**public)}))
    with pytest.raises((ConfigError, DataError), match=message):
        view.open(column(**opened), "m", where)


def test_a_single_column_must_be_named_in_brackets(tmp_path: Path) -> None:
    ages = Column(pa.chunked_array([pa.array([1])]), "age", "age")
    with pytest.raises(DataError, match=r"one column; name several in brackets: columns: \{table: \[NAME, NAME\]\}"):
        Table(cells={"age": Cells()}).open(ages, "table", context(tmp_path))


def test_cells_are_of_numbers_or_of_names() -> None:
    with pytest.raises(ConfigError, match="mean and std are for numbers"):
        Cells(mean=1.0, names=("a",))


# ---- sources


def opened(columns: dict[str, Any], **settings: Any) -> Split:
    rows = {"age": AGE, "sex": SEX, "sick": [0, 1, 0, 1]}
    register_data("people", [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)])
    source = Memory.model_validate({"data": "people", "columns": columns, "targets": {"sick": "sick"}} | settings)
    return source.open("train", name="people", data_dir=None)


def test_columns_in_brackets_are_one_value(tmp_path: Path) -> None:
    split = opened({"table": ["age", "sex"], "age": ["age"]})
    assert split.columns == {"table": "[age, sex]", "age": "[age]"}
    assert split.modality("table").values.to_pylist()[2] == {"age": None, "sex": "M"}
    assert split.modality("table").fingerprint != split.modality("age").fingerprint


def test_of_lists_in_brackets_the_first_entries_are_kept() -> None:
    register_data("steps", [{"x": [1, 2, 3], "y": [4, 5, 6]}])
    settings = {"data": "steps", "columns": {"steps": ["x", "y"]}}
    splits = [
        Memory.model_validate(settings | {"keep_first": first}).open("train", name="steps", data_dir=None)
        for first in ({}, {"x": 2, "y": 2}, {"x": 2})
    ]
    complete, both, one = (split.modality("steps") for split in splits)
    assert both.values.to_pylist() == [{"x": [1, 2], "y": [4, 5]}]
    assert len({complete.fingerprint, both.fingerprint, one.fingerprint}) == 3


def test_a_row_without_any_cell_is_a_missing_modality(tmp_path: Path) -> None:
    split = opened({"age": ["age"], "sex": ["sex"], "both": ["age", "sex"]}, incomplete="keep")
    samples = assemble(split, {"age": Table(cells={"age": Cells()})}, context(tmp_path))
    assert samples.rows["age"].tolist() == [0, 1, -1, 2]
    assert len(opened({"age": ["age"], "sex": ["sex"]}, incomplete="leave_out")) == 2
    assert len(opened({"both": ["age", "sex"]}, incomplete="leave_out")) == 4


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"table": ["age", "sick"]}, "columns.table: column 'sick' is a target; leave it out"),
        ({"table": ["age", "six"]}, "columns.table.*no column 'six'; did you mean 'sex'"),
    ],
)
def test_columns_that_cannot_be_shown_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(columns)


def test_a_table_in_a_csv_file_has_missing_cells(tmp_path: Path) -> None:
    lines = ["age,sex,label", "20,F,ill", ",M,well", "40.5,,ill", *("30,M,well" for _ in range(7))]
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    source = Folder(path="people.csv", columns={"table": ["age", "sex"]}, targets={"label": "label"}, fractions={})
    split = source.open("train", name="people", data_dir=tmp_path)
    known = Table().open(split.modality("table"), "table", context(tmp_path, table=split.modality("table")))
    assert known(torch.arange(3))[:, [0, 2]].tolist() == [[1, 1], [0, 1], [1, 0]]
    assert split.classes == {"label": ("ill", "well")}


def of_csv(path: Path, rows: Sequence[str], split: str = "train", **settings: Any) -> Split:
    path.write_text("\n".join(["age,ill,place", *rows]))
    source = Folder(path=str(path), columns={"table": ["age"]}, targets={"label": "ill"}, **settings)
    return source.open(split, name="patients", data_dir=None)


@pytest.mark.parametrize(
    ("classes", "values", "numbers"),
    [(["no", "so", "yes"], "no,yes", [0, 2]), ([0, 1, 2], "0,2", [0, 2]), ([3, 40, 7], "40,3", [1, 0])],
)
def test_classes_that_sites_agree_on_may_be_missing_at_one(
    tmp_path: Path, classes: list[int | str], values: str, numbers: list[int]
) -> None:
    rows = [f"{20 + k},{value},x" for k, value in enumerate(values.split(","))]
    settings: dict[str, Any] = {"fractions": {}, "reading": {"classes": {"label": classes}}}
    split = of_csv(tmp_path / "t.csv", rows, **settings)
    assert split.classes["label"] == tuple(map(str, classes))
    assert split.read("ill").values.to_pylist() == numbers
    with pytest.raises(DataError, match=r"column 'ill': .* is not among reading.classes.label, .*; add it there"):
        of_csv(tmp_path / "u.csv", [*rows, f"9,{1000 if values[0].isdigit() else 'maybe'},x"], **settings)
    with pytest.raises(ConfigError, match=r"reading.classes.lable: did you mean 'label'"):
        Folder(path="t.csv", targets={"label": "ill"}, reading={"classes": {"lable": classes}})


def test_of_names_that_are_one_class_the_agreed_spelling_counts(tmp_path: Path) -> None:
    reading = {"fold_labels": True, "classes": {"label": ["No", "Yes"]}}
    split = of_csv(tmp_path / "t.csv", ["1,no,x", "2,no,x", "3,YES,x"], fractions={}, reading=reading)
    assert split.read("ill").values.to_pylist() == [0, 0, 1]


def test_shares_are_drawn_of_the_rows_that_are_wanted(tmp_path: Path) -> None:
    rows = [f"{k},{'ab'[k % 2]},{'few' if k < 10 else 'many'}" for k in range(100)]
    settings: dict[str, Any] = {"fractions": {"validation": 0.2, "test": 0.3}, "where": {"place": "few"}}
    sizes = [len(of_csv(tmp_path / "t.csv", rows, split, **settings)) for split in ("train", "validation", "test")]
    assert sizes == [5, 2, 3]
