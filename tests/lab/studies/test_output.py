"""Tables, figures, exports and the page of a study, from figures made up by hand."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from matplotlib.colors import to_hex

from polyfed.core.errors import ConfigError, RunError
from polyfed.lab.studies.cells import Chosen
from polyfed.lab.studies.exports import export_study, figures_csv, latex_text, markdown_text, summary_csv
from polyfed.lab.studies.figures import draw_study, drawings_of
from polyfed.lab.studies.opened import open_study
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Drawing, Study
from polyfed.lab.studies.tables import cell_text, claims_tables, study_tables
from polyfed.reporting.compare import Spread
from polyfed.reporting.figures import ROLES

Load = Callable[..., Study]
AXES = {"alpha": {"setting": "run.seed", "values": [1, 5]}}


def results(study: Study, **more: object) -> Results:
    """``prox`` is above ``tiny`` by 1, 2 and 3 at every point; it lacks its third seed in the column MiB."""
    values = {}
    for point in study.points:
        base = 10.0 * (study.points.index(point) + 1)
        values["tiny", point, "r1"] = {0: base, 1: base + 1, 2: base + 2}
        values["prox", point, "r1"] = {0: base + 1, 1: base + 3, 2: base + 5}
        values["tiny", point, "MiB"] = dict.fromkeys(range(3), 4.0)
        values["prox", point, "MiB"] = {0: 4.0, 1: 6.0}
    return Results(study, values, **more)  # type: ignore[arg-type]


def test_cells_show_mean_spread_missing_seeds_and_what_the_paper_prints(loaded: Load) -> None:
    own = results(loaded(seeds=3, axes=AXES, printed={"prox": {"r1": {"5": 25.5}}}))
    assert cell_text(own, "prox", ("1",), "r1") == "13.00 ± 2.00"
    assert cell_text(own, "prox", ("5",), "r1") == "23.00 ± 2.00 [25.5]"
    assert cell_text(own, "prox", ("1",), "MiB") == "5.00 ± 1.41 (2)"
    assert cell_text(Results(own.study, {}), "prox", ("5",), "r1") == "- [25.5]"


def test_tables_by_hand(loaded: Load) -> None:
    settings = {name: {"paths": ["clients.*.training.optimizer.lr"]} for name in ("rate", "weight")}
    study = loaded(
        rows={"tiny": {"tune": False}, "prox": {"set": {"algorithm": {"name": "fedprox", "local_epochs": 1}}}},
        seeds=3,
        claims={"method": ["prox > tiny on r1", "prox > tiny on MiB"], "secondary": ["prox < tiny on r1"]},
        tuning={"settings": settings, "column": {"metric": "r1_sum", "kind": "validation"}, "candidates": 3},
    )
    twice = Chosen({"rate": 2.0}, {"lr": 0.2}, {"as given": 1.0, "rate x 2": 3.0}, ["rate"])
    chosen = {("prox", (), seed): choice for seed, choice in enumerate((twice, twice, Chosen({}, {}, {"": 1.0})))}
    own = results(study, chosen=chosen, causes={"x, seed 1": "why"}, replies={"tiny": [0, 0], "prox": [3, 1]})
    main, differences, judged, secondary, tuning, causes = study_tables(own)
    assert main.rows == [["tiny", "11.00 ± 1.00", "4.00 ± 0.00"], ["prox", "13.00 ± 2.00", "5.00 ± 1.41 (2)"]]
    assert "Replies clipped / excluded, over all seeds: tiny 0 / 0; prox 3 / 1." in main.notes
    assert differences.title == "r1: minus tiny"  # of costs there is none
    assert differences.rows == [["prox", "+2.00", "-1.58 to +5.58", "undecided (fewer than 5 seeds)"]]
    few = differences.rows[0][3]
    assert judged.rows[0] == ["prox > tiny on r1", "method", few, "3", "+2.00", "-1.58 to +5.58", "-"]
    assert "shared by 2 tests: intervals are of 97.5 %" in judged.notes[0]
    assert secondary.rows == [["prox < tiny on r1", "3", "+2.00", "-0.48 to +4.48"]]
    assert tuning.rows == [["prox", "1-2", "rate x 2 (2); as given (1)", "rate (2)"]]
    by_seed = "rate, weight, by seed: each seed chooses on its own validation. (n): in so many seeds."
    assert tuning.notes == (by_seed, "Not tuned: tiny.")
    assert causes.rows == [["x, seed 1", "why"]]


def test_claims_at_points_over_all_and_of_differences(loaded: Load) -> None:
    secondary = ["prox > tiny on r1", "prox at 5 - tiny at 5 > prox at 1 - tiny at 1 on r1"]
    claims = {"method": ["prox > tiny on r1 at all"], "secondary": [*secondary, "tiny on r1 at 5 > tiny on MiB at 1"]}
    own = results(loaded(seeds=3, axes=AXES, claims=claims))
    (mean,) = (item.sample for item in own.judgements())
    assert mean.by_seed == {0: 1, 1: 2, 2: 3}
    assert [sample.values for _, sample in own.readings() if sample] == [[1, 2, 3], [1, 2, 3], [0, 0, 0], [16, 17, 18]]
    _, second = claims_tables(own)
    assert [row[0] for row in second.rows[:2]] == ["prox > tiny on r1 (1)", "prox > tiny on r1 (5)"]


def test_what_is_saved_is_what_is_loaded(loaded: Load, tmp_path: Path) -> None:
    chosen = {("prox", (), 1): Chosen({"rate": 1.0}, {}, {"as given": 3.0, "rate x 2": float("nan")}, [])}
    own = results(loaded(seeds=3, claims={"method": ["prox > tiny on r1"]}), chosen=chosen)
    own.save(tmp_path)
    again = Results.load(tmp_path)
    assert again.to_json() == own.to_json()
    assert markdown_text(again) == markdown_text(own)
    of_040 = own.to_json() | {"code": ["0.4.0"], "chosen": [{"row": "prox", "point": [], "scores": {"": [1.0, 2.0]}}]}
    (tmp_path / "results.json").write_text(json.dumps(of_040))
    content = yaml.safe_load((tmp_path / "study.yaml").read_text())
    content["columns"]["MiB"]["effect"] = content["rows"]["prox"]["tune"] = None
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content | {"tuning": {"seeds": [1]}}, sort_keys=False))
    assert markdown_text(Results.load(tmp_path)) == markdown_text(replace(own, study=loaded(seeds=3), chosen={}))
    replace(own, study=loaded(seeds=2)).save(tmp_path)
    with pytest.raises(RunError, match=r"figures of seeds \[2\], which its study lacks"):
        Results.load(tmp_path)
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(RunError, match="is damaged"):
        Results.load(tmp_path)
    with pytest.raises(RunError, match="no study in"):
        open_study(tmp_path / "none")


def test_csv_has_a_line_a_seed(loaded: Load) -> None:
    lines = list(csv.DictReader(io.StringIO(figures_csv(results(loaded(seeds=3, axes=AXES))))))
    assert len(lines) == 2 * (3 + 3 + 3 + 2)
    assert lines[0] == {"row": "tiny", "alpha": "1", "column": "r1", "seed": "0", "value": "10.0"}


def test_figures_are_lines_over_numbers_bars_or_what_is_asked_for(loaded: Load, tmp_path: Path) -> None:
    over_axis = loaded(seeds=3, axes=AXES)
    assert drawings_of(over_axis) == [Drawing(column="r1", over="alpha")]
    (axes,) = draw_study(results(over_axis), Drawing(column="r1", over="alpha")).axes
    (line, *_), *_ = axes.containers
    assert list(line.get_xdata()) == [1, 5]
    assert list(line.get_ydata()) == [11, 21]
    bars = loaded(seeds=3)
    (axes,) = draw_study(results(bars), Drawing(column="r1")).axes
    assert [patch.get_width() for patch in axes.patches] == [11, 13]  # from below
    axes, _ = draw_study(results(bars), Drawing(column="r1", over=["MiB", "r1"])).axes
    assert [row.lines[0].get_xydata().tolist() for row in axes.containers] == [[[4, 11]], [[5, 13]]]
    curves = {("prox", ()): {0: Spread(1.0, 0.5), 2: Spread(3.0, 0.5)}}
    (axes,) = draw_study(results(bars, curves=curves), Drawing(column="r1", over="round")).axes
    assert axes.lines[0].get_xydata().tolist() == [[0, 1], [2, 3]]


def test_paired_differences_with_their_intervals(loaded: Load, tmp_path: Path) -> None:
    drawing = {"column": "r1", "over": "alpha", "minus": True}
    study = loaded(seeds=3, axes=AXES, figures=[drawing])
    half = 4.302653 / 3**0.5  # of 1, 2 and 3: t(2, 0.975) x 1 / sqrt(3)
    (axes,) = draw_study(results(study), Drawing(**drawing)).axes
    (line, _, (whiskers,)) = axes.containers[0]
    assert list(line.get_xdata()) == [1, 5]
    assert list(line.get_ydata()) == pytest.approx([2, 2])
    for ends in whiskers.get_segments():
        assert list(ends[:, 1]) == pytest.approx([2 - half, 2 + half], rel=1e-6)


def test_a_difference_of_one_seed_has_no_whiskers_and_of_none_no_bar(loaded: Load, tmp_path: Path) -> None:
    study = loaded(seeds=1, figures=[{"column": "r1", "minus": True}])
    drawn = []
    for rows in (["tiny", "prox"], ["prox"]):
        own = Results(study, {(row, (), "r1"): {0: {"tiny": 4.0, "prox": 7.0}[row]} for row in rows})
        (axes,) = draw_study(own, Drawing(column="r1", minus=True)).axes
        bars = [container for container in axes.containers if hasattr(container, "patches")]
        ends = [bar.errorbar.lines[2][0].get_segments()[0].tolist() for bar in bars]
        drawn.append(([bar.patches[0].get_width() for bar in bars], ends))
    assert drawn == [([3], [[[3, 0], [3, 0]]]), ([], [])]


@pytest.mark.parametrize(("row", "length", "message"), [("pooled", 1.3 * 8, "50.0 (bar cut)"), ("late", 50, "50.0")])
def test_bars_are_sorted_named_and_coloured_and_a_ceiling_does_not_flatten_them(
    loaded: Load, row: str, length: float, message: str
) -> None:
    study = loaded(rows={"tiny": {}, "prox": {}, row: {}}, claims={"method": ["prox > tiny on r1"]})
    values = {"tiny": 8.0, "prox": 7.0, row: 50.0}
    own = Results(study, {(name, (), "r1"): {0: value} for name, value in values.items()})
    (axes,) = draw_study(own, Drawing(column="r1"), {"prox": "FedProx"}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FedProx", "tiny", row]
    assert [patch.get_width() for patch in axes.patches] == pytest.approx([7, 8, length])
    colours = [ROLES[role] for role in ("own", "rival", "ceiling" if row == "pooled" else "rival")]
    assert [to_hex(patch.get_facecolor()).upper() for patch in axes.patches] == colours
    assert [text.get_text() for text in axes.texts] == ["7.0", "8.0", message]


def test_exports(loaded: Load, tmp_path: Path) -> None:
    own = results(loaded(seeds=3, title="<b>tiny</b>", claims={"method": ["prox > tiny on r1"]}))
    names = ["tables.md", "summary.csv", "figures.csv", "tables.tex", "figure-1.png", "figure-1.svg"]
    paths = export_study(own, tmp_path / "export")
    assert [path.name for path in paths if path.stat().st_size] == names
    assert [path.name for path in export_study(own, tmp_path / "few", ["svg", "csv"])] == [*names[1:3], names[-1]]
    with pytest.raises(
        ConfigError, match=r"--format latec: did you mean 'latex'\? valid: csv, latex, markdown, png, svg"
    ):
        export_study(own, tmp_path / "none", ["latec"])
    assert not (tmp_path / "none").exists()


def test_the_latex_table_has_escaped_names_the_best_in_bold_and_differences_of_the_tables(loaded: Load) -> None:
    rows = {"tiny": {}, "prox": {}, "[10 %]_a": {}, "pooled": {}}
    own = results(loaded(rows=rows, seeds=3, axes=AXES, title="R&D", claims={"method": ["prox > tiny on r1 at 1"]}))
    values = {("[10 %]_a", ("1",), "r1"): dict.fromkeys(range(3), -1.0), ("pooled", ("1",), "r1"): {0: 99.0}}
    lines = latex_text(replace(own, values={**own.values, **values})).splitlines()
    assert any(line.startswith(r"\caption{R\&D: mean $\pm$") for line in lines)
    begin = lines.index(r"\begin{tabular}{llrrr}")
    assert lines[begin + 1 : begin + 8] == [
        r"\toprule",
        r" & alpha & r1 & minus tiny & MiB \\",
        r"\midrule",
        r"tiny & 1 & 11.00 $\pm$ 1.00 &  & 4.00 $\pm$ 0.00 \\",
        r"prox & 1 & \textbf{13.00 $\pm$ 2.00} & +2.00 ($-$0.48 to +4.48), undecided & 5.00 $\pm$ 1.41 (2) \\",
        r"{[}10 \%{]}\_a & 1 & $-$1.00 $\pm$ 0.00 & $-$12.00 ($-$14.48 to $-$9.52) & - \\",
        r"pooled & 1 & 99.00 (1) & +89.00 & - \\",
    ]


def test_frames_and_the_csv_of_the_summary_have_the_figures_of_the_tables(loaded: Load, tmp_path: Path) -> None:
    claims = {"method": ["prox > tiny on r1 at 1"], "secondary": ["prox > tiny on r1 at 5"]}
    twice = Chosen({"rate": 2.0}, {"lr": 0.2}, {"as given": 1.0, "rate x 2": 3.0}, ["rate"])
    more = {"cells": {"prox, 1, seed 1": "x"}, "chosen": {("prox", ("1",), 0): twice}}
    own = results(loaded(seeds=5, axes=AXES, claims=claims), **more)
    own.save(tmp_path)
    study = open_study(tmp_path)
    frame = study.to_pandas()
    line = frame[(frame["row"] == "prox") & (frame["column"] == "r1")].iloc[0]
    written = next(one for one in csv.DictReader(io.StringIO(summary_csv(own))) if one["row"] == "prox")
    assert written == {name: "" if value != value else str(value) for name, value in line.items()}
    reach = 2 * 4.302653 / 3**0.5  # t(2, 0.975) x std / sqrt(3)
    assert line[["mean", "std", "low", "high"]].tolist() == pytest.approx([13, 2, 13 - reach, 13 + reach])
    shown = [f"{line['difference']:+.2f}", f"{line['difference low']:+.2f} to {line['difference high']:+.2f}"]
    assert study_tables(own)[2].rows[0][1:] == [*shown, line["verdict"]]
    assert line["verdict"] == "undecided (3 of 5 seeds)"
    assert frame["p"].notna().tolist() == [*[False] * 6, True, False]  # of a judged claim only where it is tested
    assert study.to_pandas("cells").iloc[0].tolist() == ["prox", "1", 1, 13.0, 6.0, "prox, 1, seed 1"]
    assert study.to_pandas("tuning").iloc[0].tolist() == ["prox", "1", 0, 2.0, "lr=0.2", 3.0, 2, "rate"]
    assert study.to_pandas("claims")["about"].tolist() == ["method", "secondary"]
    with pytest.raises(ConfigError, match="to_pandas: no table 'cell'; did you mean 'cells'"):
        study.to_pandas("cell")  # type: ignore[arg-type]


@pytest.mark.parametrize(("column", "interval"), [("MiB", "-"), ("x", "+0.99 to +3.01")])
def test_costs_that_no_seed_changes_have_no_interval(loaded: Callable[..., Study], column: str, interval: str) -> None:
    columns = {"x": {"metric": "r1_sum"}, "MiB": {"name": "traffic"}}
    claims = {"method": [f"a > b on {column}"], "secondary": [f"b > a on {column}"]}
    study = loaded(rows={"a": {}, "b": {}}, columns=columns, claims=claims, seeds=5)
    values = {(name, (), column): dict.fromkeys(range(5), figure) for name, figure in (("a", 3.0), ("b", 1.0))}
    judged, secondary = claims_tables(Results(study, values))
    assert judged.rows[0][2:6] == ["above", "5", "+2.00", interval]
    assert (judged.rows[0][6] == "-") == (column == "MiB")
    assert (secondary.rows[0][3] == "-") == (column == "MiB")
