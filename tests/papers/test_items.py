"""Studies of the papers: all items are there, hold together, and every cell of them is an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from paper_studies import NAMES, STUDIES
from polyfed.lab.downstream.suite import Suite
from polyfed.lab.studies.cells import Places, StudyPlan
from polyfed.lab.studies.columns.metrics import Downstream
from polyfed.lab.studies.study import Study
from polyfed.runs.config_files import read_config

Printed = Mapping[str, float]


@pytest.fixture(scope="module")
def load() -> Callable[[str, str], Study]:
    """Each study once a scale."""
    known: dict[tuple[str, str], Study] = {}

    def loaded(name: str, scale: str = "small") -> Study:
        if (name, scale) not in known:
            known[name, scale] = Study.load(STUDIES[name], scale)
        return known[name, scale]

    return loaded


def plan(study: Study, folder: Path) -> StudyPlan:
    return StudyPlan(study, Places(), folder)


def test_every_item_has_a_file() -> None:
    assert {*NAMES} <= STUDIES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_study_names_its_item(name: str, load: Callable[..., Study]) -> None:
    paper, _, item = name.partition("/")
    form = {"t": "Table", "f": "Figure"}.get(item[0] if item[1:].isdigit() else "", "")
    for scale in ("small", "paper", "smoke"):
        study = load(name, scale)
        assert study.source.paper.lower() == paper
        assert study.title.startswith(f"{study.source.paper}, ")
        assert study.source.item == f"{form} {item[1:]}" or not form
        assert study.description.endswith(".")
    # a study of one run has nothing to claim, but what it prints or draws
    small = load(name)
    runs = {row.model_copy(update={"columns": {}}).model_dump_json() for row in small.rows.values()}
    assert small.claims.to_judge or (small.printed and len(runs) == 1) or name == "fedafd/t2"
    by_row = ((c.left[0].row, c.right[0].row) for c in small.claims.to_judge if c.kind == "method")
    assert all(left != right for left, right in by_row)  # one row at two points does not compare methods


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_a_study_begins_with_an_experiment(name: str, scale: str, load: Callable[..., Study], tmp_path: Path) -> None:
    study = load(name, scale)
    row = next(iter(study.rows))
    plan(study, tmp_path).check(row, study.points_of(row)[0])


@pytest.mark.slow  # 850 cells
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_cell_is_an_experiment(name: str, scale: str, load: Callable[..., Study], tmp_path: Path) -> None:
    for row, point in (cells := plan(load(name, scale), tmp_path)).row_points():
        cells.check(row, point)


@pytest.mark.parametrize("name", NAMES)
def test_scales_small_and_paper_have_the_same_lines(name: str, load: Callable[..., Study]) -> None:
    small, paper = load(name), load(name, "paper")
    assert list(small.rows) == list(paper.rows)
    # but what small figures are the target of
    assert [name for name in small.columns if name in paper.columns] == list(paper.columns)
    assert read_config(paper.base) != read_config(small.base)


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_probes_are_tasks_of_their_suites(scale: str, load: Callable[..., Study]) -> None:
    columns = [column for name in NAMES for column in load(name, scale).columns.values()]
    asked = [column for column in columns if isinstance(column, Downstream)]
    assert all(column.task in Suite.load(column.suite).tasks for column in asked)
    assert {Path(column.suite).stem for column in asked} == {"fashion" if scale == "small" else "medical-paper-scale"}


# ---- what the papers print adds up


def printed(study: Study) -> Iterator[tuple[str, str, Printed]]:
    """Row, label and its printed columns."""
    for row, by_column in study.printed.items():
        labels = {label for value in by_column.values() if isinstance(value, dict) for label in value} or {""}
        for label in sorted(labels):
            values = {c: v.get(label) if isinstance(v, dict) else v for c, v in by_column.items()}
            yield row, label, {column: value for column, value in values.items() if value is not None}


RECALLS = ("i2t R@1 1k", "t2i R@1 1k", "i2t R@1 5k", "t2i R@1 5k")
SUMS: Mapping[str, tuple[tuple[str, ...], str, float]] = {
    "creamfl/t1": (tuple(name.replace("k", "K") for name in RECALLS), "r1_sum", 0.075),
    **{f"fedcola/{table}": (RECALLS, "r1_sum", 0.025) for table in ("t8", "t9", "t10")},
    **{f"fedafd/{table}": (("server i2t", "server t2i"), "server rsum", 0.015) for table in ("t1", "t5", "t7")},
    "fedafd/t2": (("MiB up", "MiB down"), "MiB both", 0.005),
}
"""Columns that add up to another, within rounding; FedGEMS' four recalls are 0.07 off their sum in the paper."""


@pytest.mark.parametrize("name", SUMS)
def test_printed_parts_add_up(name: str, load: Callable[..., Study]) -> None:
    parts, total, tolerance = SUMS[name]
    checked = [
        (row, label, sum(values[part] for part in parts), values[total])
        for row, label, values in printed(load(name))
        if {*parts, total} <= set(values)
    ]
    assert len(checked) >= 4
    for row, label, result, expected in checked:
        assert result == pytest.approx(expected, abs=tolerance), (row, label)


SLIPS = {("fedaid/t10", "centralised", 1), ("fedaid/t15", "shallow, C4", 1)}
"""Means that are not of the five figures next to them in the paper."""


@pytest.mark.parametrize("name", [f"fedaid/{table}" for table in ("t10", "t15", "t16", "t17")])
def test_printed_means_are_of_the_hospitals(name: str, load: Callable[..., Study]) -> None:
    for row, _, values in printed(load(name)):
        for k in (1, 5):
            if (name, row, k) not in SLIPS:
                mean = fmean(values[f"C{client} Rec@{k}"] for client in range(1, 6))
                assert mean == pytest.approx(values[f"mean Rec@{k}"], abs=0.15), (row, k)


SHARED: tuple[tuple[str, str, str, str, Any], ...] = (
    ("creamfl/t1", "creamfl", "creamfl/t3", "creamfl", "r1_sum"),
    ("creamfl/t1", "reamfl+iot", "creamfl/t3", "reamfl+iot", "r1_sum"),
    ("fedcola/t2", "ca+cp+cl", "fedcola/t3", "blocks", "r1_sum"),
    ("fedcola/t2", "ca+cp", "fedcola/t6", "fedcola, ca only", "r1_sum"),
    ("fedcola/t3", "attention", "fedcola/t6", "fedcola, attn", "MiB down"),
    ("fedafd/t1", "fedafd", "fedafd/k10", "fedafd", "server rsum"),
    ("fedafd/t9", "sed", "fedafd/t1", "fedafd", "server rsum"),
    ("fedaid/t1", "fedavg", "fedaid/t8", "fedavg", "worst@5"),
    ("fedaid/t10", "fedavg", "fedaid/t16", "fedavg", "C3 Rec@5"),
    ("fedaid/t10", "fedavg", "fedaid/t11", "server", "C4 Rec@1"),
)


def test_what_two_tables_print_is_equal(load: Callable[..., Study]) -> None:
    for one, row, other, its, column in SHARED:
        assert load(one).printed[row][column] == load(other).printed[its][column], (one, row, other)


def test_rows_that_two_studies_share_are_the_same_cells(load: Callable[..., Study], tmp_path: Path) -> None:
    for positions in (
        (("fedaid/t6", "fedavg"), ("fedaid/t9", "fedavg")),
        (("fedaid/t10", "decentralised 1"), ("fedaid/t16", "local 3")),
        (("fedafd/t9", "sed"), ("fedafd/f3", "multi-modal")),
        (("fedcola/t5", "1"), ("fedcola/shapley", "both")),
    ):
        plans = [(plan(load(name).model_copy(update={"tuning": None}), tmp_path), row) for name, row in positions]
        assert len({own.cell(row, (), 0).digest for own, row in plans}) == 1
