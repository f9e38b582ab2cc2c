"""Comparisons of runs, and paired differences against scipy's t-test and by hand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from PIL import Image
from scipy import stats

import polyfed
from polyfed.core.errors import ConfigError
from polyfed.reporting.compare import RunComparison, Spread
from polyfed.runs.records import RunRecords
from run_folders import write_lines, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three seeds of one configuration, and a run of another."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        RunRecords.load(write_run(folder / f"{name}-{seed}", rounds=4, seed=seed, gain=gain, algorithm=name))
        for name, gain, seed in [("cream", 30.0, 1), ("avg", 40.0, 1), ("cream", 30.0, 2), ("cream", 30.0, 3)]
    ]


def test_runs_that_differ_by_seed_are_taken_together(runs):
    cream, avg = RunComparison.of(runs).entries
    assert [run.name for run in cream.runs] == ["cream-1", "cream-2", "cream-3"]
    assert (cream.label, avg.label, len(avg.runs)) == ("cream-1", "avg-1", 1)
    values = [run.metrics("server")["r1_sum"] for run in cream.runs]
    figures = {name: spread.mean for name, spread in cream.metrics.items()}
    assert figures["server r1_sum"] == pytest.approx(fmean(values))
    assert cream.metrics["server r1_sum"].std == pytest.approx(stdev(values))
    assert math.isnan(avg.metrics["server r1_sum"].std)
    assert cream.rounds == [run.chosen.number for run in cream.runs]
    accuracies = [[run.last(c)["accuracy"] for c in run.groups["image"] if run.last(c)] for run in cream.runs]
    assert figures["image accuracy"] == pytest.approx(fmean(map(fmean, accuracies)))
    assert figures["image accuracy worst"] == pytest.approx(fmean(map(min, accuracies)))
    apart = [max(values) - min(values) for values in accuracies]
    assert figures["image accuracy disparity"] == pytest.approx(fmean(apart))
    assert figures["MiB"] == pytest.approx(4 * 9 * 4_500_200 / 2**20)
    assert "paired r1_sum" in figures
    assert "server image_to_text_r@1" in RunComparison.of(runs, "image_to_text_r@1", "validation").entries[0].metrics


@pytest.mark.parametrize(
    ("settings", "configurations"),
    [
        ([{"task": {"fold_seed": n, "name": "retrieval"}} for n in (1, 2)], 2),
        ([{"seed": n, "name": f"n{n}", "description": f"{n}"} for n in (1, 2)], 1),
    ],
    ids=["other seeds and nested names keep runs apart", "names and descriptions do not"],
)
def test_configurations_differ_by_settings_not_by_labels(tmp_path, settings, configurations):
    folders = [write_run(tmp_path / str(k), rounds=1, **changes) for k, changes in enumerate(settings)]
    assert len(polyfed.compare(folders).entries) == configurations


def test_runs_without_configuration_stay_apart(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    assert len(RunComparison.of([RunRecords.load(tmp_path / name) for name in "ab"]).entries) == 2
    assert (polyfed.compare([]).tables, polyfed.compare([]).to_json()) == ([], [])


def test_rows_and_tables(runs):
    compared = polyfed.compare([run.folder for run in runs])
    cream, _ = compared.entries
    first, second = compared.to_json()
    assert (first["run"], second["run"], first["seeds"], first["MiB std"]) == ("cream-1", "avg-1", 3, 0.0)
    assert ([row[0] for row in compared.table.rows], compared.tables[0]) == (["avg-1", "cream-1"], compared.table)
    # worst clients have a table of their own
    assert not any("worst" in name or "disparity" in name for name in compared.table.columns)
    rows = {row[0]: row[1:] for row in compared.tables[1].rows}
    assert next(iter(rows)).startswith("avg-1: ")
    names = ("image accuracy", "image accuracy worst", "image accuracy disparity")
    assert rows["cream-1: image accuracy"] == tuple(str(cream.metrics[name]) for name in names)
    assert len(rows) == 6


def test_a_comparison_shows_itself_in_a_notebook_a_terminal_and_a_frame(runs, tmp_path):
    hostile = Path(shutil.copytree(runs[0].folder, tmp_path / "<script>x"))
    compared = polyfed.compare([hostile, polyfed.open_run(runs[1].folder)], against="avg-1")
    shown = compared._repr_html_()
    assert (shown.count("<table>"), shown.count("<svg"), shown.count("<script>")) == (3, 1, 0)
    assert all(text in shown for text in ("&lt;script&gt;x", "Paired differences against avg-1", "by communication"))
    assert all(table.title in repr(compared) for table in compared.tables)
    frame, paired = compared.to_pandas(), compared.to_pandas("differences")
    assert (list(frame["run"]), len(paired)) == (["<script>x", "avg-1"], len(compared.differences))
    assert paired["mean"][0] == pytest.approx(frame["server r1_sum"][0] - frame["server r1_sum"][1])
    with pytest.raises(ConfigError, match="no table 'run'; did you mean 'runs'"):
        compared.to_pandas("run")


def test_spread_ignores_what_is_not_finite():
    assert str(Spread.of([1.0, 3.0, math.nan])) == f"2.00 ± {2**0.5:.2f}"
    assert str(Spread.of([])) == "-"


def test_drawing(runs, tmp_path):
    with Image.open(RunComparison.of(runs, "accuracy").save(tmp_path / "out" / "compare.png")) as image:
        assert image.format == "PNG"
        assert len(set(image.convert("RGB").resize((200, 200)).get_flattened_data())) > 20


CREAM, ALONE = {0: 24.0, 1: 26.5, 2: 25.0, 3: 29.0}, {0: 20.0, 1: 21.0, 2: 24.5, 3: 22.0}


def run_with(folder: Path, seed: int | None, test: list[float], validation: Any = (), **more: Any) -> RunRecords:
    """A run whose server has these test (and validation) values in rounds 0, 1, ...; clients' are final."""
    folder.mkdir(parents=True)
    clients = more.pop("clients", {})
    lines = [
        {"round": number, "participant": "server", "kind": split, "metrics": {"r1_sum": value}}
        for split, values in {"test": test, "validation": validation}.items()
        for number, value in enumerate(values)
    ]
    of_client = {"round": 1, "kind": "test"}
    lines += [of_client | {"participant": one, "metrics": {"accuracy": value}} for one, value in clients.items()]
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "config.yaml").write_text(json.dumps({"run": {"seed": seed}, **more}))
    return RunRecords.load(folder)


def two(folder: Path, one: dict[int, float], other: dict[int, float]) -> list[RunRecords]:
    """Runs of two configurations with a final value a seed, the second with its seeds in another order."""
    runs = [run_with(folder / f"alone-{seed}", seed, [1.0, value], name="x") for seed, value in other.items()]
    mine = reversed(one.items())
    return runs + [run_with(folder / f"cream-{seed}", seed, [9.0, value], algorithm="cream") for seed, value in mine]


def test_figures_are_those_of_a_paired_t_test(tmp_path: Path) -> None:
    (item,) = RunComparison.of(two(tmp_path, CREAM, ALONE)).differences
    assert (item.comparison.label, item.reference.label, item.metric) == ("cream-3", "alone-0", "server r1_sum")
    assert item.by_seed == {0: 4.0, 1: 5.5, 2: 0.5, 3: 7.0}
    assert (item.mean, item.smallest) == (4.25, 0.5)
    # deviations -0.25, 1.25, -3.75, 2.75: squares sum up to 23.25
    assert item.std == pytest.approx(math.sqrt(23.25 / 3))
    expected = stats.ttest_rel(list(CREAM.values()), list(ALONE.values())).confidence_interval(0.95)
    assert item.interval == pytest.approx((expected.low, expected.high))
    reach = 3.182446 * item.std / 2  # of four seeds, from a table of t
    assert item.interval == pytest.approx((4.25 - reach, 4.25 + reach), abs=1e-5)


def test_only_common_seeds_count_and_the_reference_can_be_chosen(tmp_path: Path) -> None:
    runs = two(tmp_path, CREAM | {7: 99.0}, ALONE | {8: -99.0})
    (item,) = RunComparison.of(runs, against="cream-2").differences
    assert (item.comparison.label, item.reference.label) == ("alone-0", "cream-7")
    assert item.by_seed == {0: -4.0, 1: -5.5, 2: -0.5, 3: -7.0}
    assert item.smallest == -7.0
    with pytest.raises(ConfigError, match="no run 'cream-9' here to compare against; did you mean 'cream-"):
        RunComparison.of(runs, against="cream-9")


def test_of_runs_with_one_name_the_folder_selects_the_reference(tmp_path: Path) -> None:
    runs = [run_with(tmp_path / name / "run", 0, [value], algorithm=name) for name, value in (("a", 1.0), ("b", 4.0))]
    with pytest.raises(ConfigError, match="2 configurations have a run 'run' to compare against; give its folder"):
        RunComparison.of(runs, against="run")
    (item,) = RunComparison.of(runs, against=str(tmp_path / "b" / "run")).differences
    assert item.by_seed == {0: -3.0}


def test_each_run_is_compared_by_its_own_model(tmp_path: Path) -> None:
    runs = [
        run_with(tmp_path / "a", 0, [1.0, 5.0, 2.0], [0.0, 1.0, 9.0]),
        run_with(tmp_path / "b", 0, [1.0, 7.0, 3.0], [0.0, 9.0, 1.0], algorithm="b"),
        run_with(tmp_path / "c", 0, [1.0, 8.0, 4.0], algorithm="c"),
    ]
    compared = RunComparison.of(runs)
    items = compared.differences
    assert [(item.comparison.label, item.by_seed[0]) for item in items] == [("b", 7.0 - 2.0), ("c", 4.0 - 2.0)]
    table = compared.table
    shown = [("b", "1", "1", "7.00"), ("c", "1", "2", "4.00"), ("a", "1", "2", "2.00")]
    assert [row[:4] for row in table.rows] == shown
    assert "(the last, without validation: c)" in table.notes[1]


def test_one_configuration_gets_the_command_of_its_twin(tmp_path: Path) -> None:
    server = {"source": "shop", "validation_split": "validation"}
    config = {"algorithm": {"name": "creamfl"}, "public": {"source": "shop"}, "server": server}
    folder = write_run(tmp_path / "mine", rounds=2, **config)
    notes = polyfed.compare([folder]).table.notes
    command = f"polyfed run {folder}/config.yaml --twin server-only --out {folder}-server-only"
    assert notes[-1] == f"A single configuration has no counterpart; its server alone: {command}."


def test_groups_are_compared_by_the_mean_of_their_clients(tmp_path: Path) -> None:
    runs = [
        run_with(tmp_path / "a", 0, [], clients={"x": 10.0, "y": 20.0}),
        run_with(tmp_path / "b", 0, [3.0], clients={"x": 30.0, "y": 41.0}, algorithm="b"),
    ]
    (item,) = RunComparison.of(runs).differences  # only one has a server
    assert (item.metric, item.by_seed) == ("clients accuracy", {0: 35.5 - 15.0})


def test_one_common_seed_has_no_interval_and_few_prove_nothing(tmp_path: Path) -> None:
    compared = RunComparison.of(two(tmp_path / "1", {0: 3.0, 5: 1.0}, {0: 1.0}))
    (item,) = compared.differences
    assert math.isnan(item.std) and all(map(math.isnan, item.interval))  # noqa: PT018
    table = compared.tables[-1]
    assert table.rows == [("cream-5: server r1_sum", "1", "+2.00", "-", "-", "+2.00")]
    assert table.notes[1:] == [
        "One common seed has no spread and no interval: at least two are needed.",
        "Differences over fewer than 5 seeds prove nothing.",
    ]
    figures = {"seeds": [0], "mean": 2.0, "std": None, "interval_95": None, "smallest": 2.0}
    assert item.to_json() == {"figure": "server r1_sum", "against": "alone-0"} | figures
    compared = RunComparison.of(two(tmp_path / "2", {0: 3.0, 1: 3.0}, {0: 1.0, 1: 1.0}))
    (item,) = compared.differences
    low, high = item.interval
    assert low < 2.0 < high  # equal differences give neither nan nor a proof
    assert compared.tables[-1].notes[1:] == ["Differences over fewer than 5 seeds prove nothing."]


def test_runs_without_common_seeds_are_named_and_without_pairs_tables_are_empty(tmp_path: Path) -> None:
    runs = two(tmp_path, CREAM, ALONE)
    other = run_with(tmp_path / "other", 9, [1.0], algorithm="other")
    table = RunComparison.of([*runs, other]).tables[-1]
    assert len(table.rows) == 1
    assert table.rows[0][1:4:2] == ("4", "2.78")
    assert table.notes[1] == "No seed, or no metric, in common with the reference: other."
    for few in ([], [other], [runs[0], other], [run_with(tmp_path / str(k), None, [1.0], k=k) for k in range(2)]):
        assert not any(table.title.startswith("Paired") for table in RunComparison.of(few).tables)
