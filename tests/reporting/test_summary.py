"""Summary of a run in sentences and tables."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from html_pages import Page
from rich.console import Console

from polyfed.reporting.compare import RunComparison
from polyfed.reporting.page import html_report, write_report
from polyfed.reporting.run_tables import clients_page_table
from polyfed.reporting.summary import RunSummary, finished_twin, finished_zero_shot
from polyfed.runs.records import RunRecords
from run_folders import write_lines, write_measured, write_run

Metrics = dict[str, float]
records = RunRecords.load
SERVER = {"source": "shop", "validation_split": "validation"}
FEDERATION = {"data": {"sources": {}}, "public": {"source": "shop"}, "server": SERVER, "clients": {"image": {}}}


def run_of(folder: Path, algorithm: str, **changes: object) -> RunRecords:
    """A finished run of one federation with an algorithm."""
    write_run(folder, algorithm={"name": algorithm}, **(FEDERATION | changes))
    (folder / "report.html").touch()
    (folder / "models" / "last").mkdir(parents=True)
    (folder / "models" / "last" / "config.json").write_text('{"round": 12}')
    return records(folder)


def test_the_end_fits_a_terminal_of_30_rows_and_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(Path("runs/twin"), "server_only")
    stream = io.StringIO()
    Console(file=stream, width=80).print(RunSummary(run_of(Path("runs/creamfl"), "creamfl")), crop=False)
    assert len(stream.getvalue().splitlines()) <= 30
    text = " ".join(stream.getvalue().split())
    gain = "brings no clear difference (+0.0 points, 95 % interval"  # the twin has the same records
    for part in ("times chance", gain, "one run).", "Page: runs/creamfl/report.html"):
        assert part in text
    steps = stream.getvalue().partition("Next:\n")[2].splitlines()
    assert steps[0] == "  polyfed compare runs/twin runs/creamfl"
    assert steps[2] == "  polyfed run runs/creamfl/config.yaml --seeds 1,2,3,4"


def accurate(value: float, constant: float, **sizes: float) -> Metrics:
    return {"accuracy": value, "accuracy_of_constant": constant} | sizes


def recalled(name: str, value: float, images: float, texts: float) -> Metrics:
    positives = f"{name.rpartition('_')[0]}_positives_per_query"
    return {name: value, "gallery_image": images, "gallery_text": texts, positives: 1.0}


FEW = accurate(54.0, 50.0, n=100.0)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (accurate(10.0, 10, n=50), "accuracy is 10.00 %, 95 % interval 3.3 to 21.8, no better than chance (10.00 %)"),
        (accurate(54.0, 50, n=10_000), "to 55.0, 1.08 times chance (50.00 %)"),
        (accurate(54.0, 50, n=100), "to 64.0, no better than chance (50.00 %)"),
        (accurate(54.0, 50), "54.00 %, 1.08 times chance (50.00 %)"),
        (accurate(50.0, 50), "50.00 %, no better than chance (50.00 %)"),
        (recalled("image_to_text_r@19", 100.0, 1000, 1000), "to 100.0, 52.6 times chance (1.90 %)"),
        (recalled("image_to_text_r@19", 100.0, 20, 20), "to 100.0, no better than chance (95.00 %)"),
        # captions of one image are not separate trials
        (recalled("text_to_image_r@10", 42.0, 30, 150), "no better than chance (33.33 %)"),
        (accurate(42.0, 100 / 3, n=150, items=30), "no better than chance (33.33 %)"),
        (accurate(42.0, 100 / 3, n=150), "1.3 times chance (33.33 %)"),
    ],
)
def test_better_than_chance_depends_on_the_number_of_items(tmp_path: Path, metrics: Metrics, expected: str) -> None:
    folder = write_run(tmp_path / "run")
    write_measured(folder, {"server": metrics})
    assert expected in RunSummary(records(folder)).verdict


def test_an_interval_that_the_evaluation_kept_decides(tmp_path: Path) -> None:
    folder, line = write_run(tmp_path / "run"), measured_line(accurate(42.0, 100 / 3, n=150))
    write_lines(folder / "metrics.jsonl", [line | {"intervals": {"accuracy": [30.0, 54.0]}}])
    assert "is 42.00 %, 95 % interval 30.0 to 54.0, no better than chance" in RunSummary(records(folder)).verdict


@pytest.mark.parametrize(("test", "expected"), [("all", "no better than chance"), ("dealt", "1.3 times chance")])
def test_clients_that_share_their_test_items_add_none(tmp_path: Path, test: str, expected: str) -> None:
    folder = write_run(tmp_path / "run", clients={"image": {"source": "shop", "test_split": "test", "test": test}})
    write_measured(folder, {f"image-{number}": accurate(42.0, 100 / 3, n=40) for number in range(4)})
    assert expected in RunSummary(records(folder)).verdict


@pytest.mark.parametrize(
    ("values", "judged"),
    [
        ({"image-0": 60.0, "image-1": 40.0}, "The mean accuracy of the 2 clients that have it is 50.00 %, 2.0 times"),
        ({"image-0": 75.0}, "The accuracy of the one client that has it is 75.00 %, 3.0 times"),
    ],
)
def test_without_a_server_the_clients_are_judged(tmp_path: Path, values: dict[str, float], judged: str) -> None:
    folder = write_run(tmp_path / "run")
    write_measured(folder, {name: accurate(value, 25) for name, value in values.items()})
    assert RunSummary(records(folder)).verdict.startswith(f"{judged} chance (25.00 %), after")


def test_a_run_without_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    assert "it has no metrics" in RunSummary(records(folder)).verdict
    assert clients_page_table(records(folder)).notes == ("Clients were not evaluated (run.evaluate_clients).",)


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("server_only", {"public": {"source": "other"}}),
        ("server_only", {"seed": 1}),
        ("server_only", {"rounds": 3}),
        ("local", {"clients": {"text": {}}}),
    ],
)
def test_a_run_of_another_federation_seed_or_length_is_not_a_twin(tmp_path: Path, algorithm: str, changes: Any) -> None:
    run_of(tmp_path / "alone", algorithm, **changes)
    assert finished_twin(run_of(tmp_path / "creamfl", "creamfl"), algorithm) is None


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, "server-only", "its server alone"),
        ({"public": None}, "local", "its clients alone"),
        ({"server": {"source": "a"}}, "local", "its clients alone"),
    ],
)
def test_the_baseline_that_is_advised_is_a_twin_that_there_is(
    tmp_path: Path, changes: Any, kind: str, words: str
) -> None:
    mine, folder = run_of(tmp_path / "work/runs/my run", "creamfl", **changes), tmp_path / "work/runs/my run"
    command = f"polyfed run '{folder}/config.yaml' --twin {kind} --out '{folder}-{kind}'"
    assert RunSummary(mine).baseline(folder) == (words, command)
    assert RunSummary(mine).baseline() == (words, command.replace(f"{folder.parent}/", ""))
    (folder / ".start").write_text("../..")
    assert RunSummary(mine).baseline() == (words, message := command.replace(f"{tmp_path}/work/", ""))
    assert f"\n## Next\n\n    {message}\n    polyfed evaluate 'runs/my run'" in write_report(mine).read_text()
    page = Page(html_report(mine, figures={}))
    assert f"Not yet compared with {words}: the first command of" in page.text
    assert page.text.count("polyfed run '") == page.texts.count(message) == 1


ENCODERS = {
    name: {"name": "hf", "projection": "own", "adapter": {"name": "lora"}, "view": {"name": "pixels"}}
    for name in ("image", "text")
}
UNTOUCHED = {name: {"name": "hf", "projection": "own", "view": {"name": "pixels"}} for name in ENCODERS}


def of_towers(folder: Path, gain: float, **encoders: object) -> RunRecords:
    server = SERVER | {"model": {"encoders": ENCODERS | encoders}, "task": {"name": "retrieval"}}
    return run_of(folder, "fedit", gain=gain, server=server)


def zero_shot(folder: Path, gain: float, **changes: object) -> RunRecords:
    server = SERVER | {"model": {"encoders": UNTOUCHED}, "task": {"name": "retrieval"}}
    twin = {"kind": "zero-shot", "of": "mine"}
    return run_of(folder, "server_only", gain=gain, server=server, clients={}, twin=twin, **changes)


@pytest.mark.parametrize("gain", [4.0, 40.0])
def test_the_gain_over_untouched_encoders_is_a_sentence(tmp_path: Path, gain: float) -> None:
    twin, mine = zero_shot(tmp_path / "untouched", gain), of_towers(tmp_path / "mine", 15.0)
    own, value = (run.metrics("server")["r1_sum"] for run in (mine, twin))
    gain = f"Gain over the untouched encoders ({value:.2f}, round {twin.chosen.number}): {own - value:+.2f}"
    assert RunSummary(mine).sentences[-1].startswith(f"{gain}, 95 % interval")
    # the twin is not a server that trained alone, and has no twin itself
    assert finished_twin(mine, "server_only") is None
    summary = RunSummary(twin)
    assert summary.gain_over_untouched == ""
    assert "zero-shot" not in str(summary.next_steps())


def test_the_gain_over_training_alone_has_an_interval_from_both(tmp_path: Path) -> None:
    mine, twin = run_of(tmp_path / "mine", "fedavg"), run_of(tmp_path / "alone", "local")
    for one, value, more in ((twin, 20.0, {}), (mine, 50.0, {"server": accurate(60.0, 25, n=500)})):
        write_measured(one.folder, more | {f"image-{k}": accurate(value, 25, n=50) for k in range(2)})
    together, alone = (RunSummary(records(one.folder)) for one in (mine, twin))
    # 39.8 to 60.2 less 12.7 to 29.2
    shown = [(one.whose, one.gain) for one in together.results]
    assert shown == [("image, mean of 2", "+30.0 (16.3 to 42.5)"), ("server", "-")]
    gain = "by guessing; training together brings a gain (+30.0 points, 95 % interval 16.3 to 42.5, one run)."
    subject = ": a client of image, on average, is right in"
    assert f"data{subject} 50.0 % of cases, against 20.0 % alone and 25.0 % {gain}" in together.in_short
    assert f"trained, each alone{subject} 20.0 % of cases, against 25.0 % {gain}" in alone.in_short


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (
            {"server": accurate(54.0, 50, n=10_000)},
            "the server is right in 54.0 % of cases, against 50.0 % by guessing.",
        ),
        ({"server": FEW}, "the server is right in 54.0 % of cases, against 50.0 % by guessing, which is not"),
        ({"image-0": {"dice": 60.0}}, "a client of image, on average, finds outlines that overlap the"),
        ({"server": {"{x}": 7.0}}, "the server reaches 7.0 ({x})"),
        ({"server": {"loss": 7.0}}, "nothing was measured"),
    ],
)
def test_the_first_sentence_is_plain_english(tmp_path: Path, measured: Any, expected: str) -> None:
    folder = write_run(tmp_path / "run")
    write_measured(folder, measured)
    assert f"9 clients trained together without sharing their data: {expected}" in RunSummary(records(folder)).in_short


# ---- by site

ALONE, FEDERATED = {"north": 20.0, "south": 40.0, "west": 60.0}, {"north": 50.0, "south": 45.0, "west": 30.0}


def of_sites(folder: Path, algorithm: str, values: dict[str, float], **metrics: float) -> RunRecords:
    """A finished run whose clients are named sites with these accuracies and 100 test items each."""
    run_of(folder, algorithm, public=None, clients={name: {"count": 1, "source": name} for name in values})
    more = metrics or {"accuracy_of_constant": 25.0, "n": 100.0}
    measured = {name: more if metrics else more | {"accuracy": value} for name, value in values.items()}
    write_measured(folder, measured, 12)
    return records(folder)


def test_each_site_gets_its_gain_by_taking_part(tmp_path: Path) -> None:
    mine = of_sites(tmp_path / "mine", "fedavg", FEDERATED)
    command = "polyfed run mine/config.yaml --twin local --out mine-local"
    assert RunSummary(mine).baseline() == ("each site alone", command)
    assert RunSummary(mine).table.rows[0] == ("north: accuracy", "50.00", "25.00", "100")
    assert "what training together brings is not measured yet." in RunSummary(mine).in_short
    twin = of_sites(tmp_path / "mine-local", "local", ALONE)
    assert RunSummary(mine).baseline() is None
    for one in map(RunSummary, (mine, twin)):  # whichever ended last
        how = "together without sharing their data" if one.records is mine else "each alone"
        assert one.in_short.replace("trained,", "trained") == (
            f"north, south and west trained {how}: taking part brings a gain to 1 of 3 sites: north +30.0 (16.3 to "
            "42.5); a loss to 1 of 3 sites: west -30.0 (-43.0 to -15.7); no clear difference to 1 of 3 sites: south "
            "+5.0 (-9.3 to 19.1) (points with 95 % intervals, one run)."
        )
        assert one.table.rows[0] == ("north: accuracy", "20.00", "50.00", "+30.0 (16.3 to 42.5)", "25.00", "100")
        assert one.table.notes[0] == "Percent. Clients: after their own last evaluation (round 12)."
        assert one.in_short in write_report(one.records).read_text()
    table = clients_page_table(mine)
    (shown,) = (dict(zip(table.columns, row, strict=True)) for row in table.rows if row[0] == "north")
    assert [shown[name] for name in ("accuracy", "alone", "gain")] == ["50.00", "20.00", "+30.0 (16.3 to 42.5)"]
    page, names = Page(html_report(mine)), [f"{site}, {how}" for site in ALONE for how in ("alone", "federation")]
    assert page.parts[0] == "gain"
    assert [title.partition(":")[0] for title in page.titles if title.partition(":")[0] in names] == names


RECALLS = {"a_to_b_r@1": 20.0, "b_to_a_r@1": 40.0, "gallery_a": 50.0, "gallery_b": 250.0}
RECALLS |= {"a_to_b_positives_per_query": 5.0, "b_to_a_positives_per_query": 1.0, "r1_sum": 60.0}


@pytest.mark.parametrize(
    ("metrics", "label", "shown"),
    [
        (RECALLS, "mean R@1", ("30.00", "+0.0 (-19.0 to 19.0)", "2.00", "50")),  # the smaller gallery
        # pixels of all images together are not items; a metric of an own task may not be a share
        ({"dice": 60.0, "dice_of_constant": 9.0, "n": 50.0}, "dice", ("60.00", "+0.0", "9.00", "50")),
        ({"answers": 7.0, "n": 50.0}, "answers", ("7.00", "+0.0", "50")),
    ],
)
def test_the_interval_of_a_sites_gain_is_that_of_its_metric_and_items(
    tmp_path: Path, metrics: dict[str, float], label: str, shown: tuple[str, ...]
) -> None:
    of_sites(tmp_path / "alone", "local", ALONE, **metrics)
    table = RunSummary(of_sites(tmp_path / "mine", "fedavg", ALONE, **metrics)).table
    assert table.rows == [(f"{site}: {label}", shown[0], *shown) for site in ALONE]


@pytest.mark.parametrize("changes", [{"seed": 1}, {"data": {"sources": {"shop": {}}}}])
def test_untouched_encoders_of_another_seed_or_data_are_not_a_twin(tmp_path: Path, changes: dict[str, object]) -> None:
    zero_shot(tmp_path / "untouched", 40.0, **changes)
    mine = of_towers(tmp_path / "mine", 40.0)
    assert finished_zero_shot(mine) is None
    folder = tmp_path / "mine"
    expected = f"polyfed run {folder}/config.yaml --twin zero-shot --out {folder}-zero-shot"
    assert expected in dict(RunSummary(mine).next_steps(folder)).values()


@pytest.mark.parametrize("image", [{"name": "cnn"}, {"projection": "new"}, "cnn"])
def test_without_a_common_space_no_untouched_encoders_are_advised(tmp_path: Path, image: object) -> None:
    zero_shot(tmp_path / "untouched", 40.0)
    mine = of_towers(tmp_path / "mine", 40.0, image=image)
    assert finished_zero_shot(mine) is None
    assert "zero-shot" not in str(RunSummary(mine).next_steps())


def test_a_twin_that_is_not_finished_or_is_damaged_is_left_alone(tmp_path: Path) -> None:
    mine = run_of(tmp_path / "creamfl", "creamfl")
    run_of(tmp_path / "a", "server_only")
    (tmp_path / "a" / "report.html").unlink()
    run_of(tmp_path / "b", "server_only")
    (tmp_path / "b" / "config.yaml").write_text("a: [")
    assert finished_twin(mine, "server_only") is None
    twin = run_of(tmp_path / "c", "server_only")
    assert finished_twin(mine, "server_only") == twin
    assert RunSummary(mine).baseline() is None


def test_the_table_has_ten_lines_at_most_however_many_sites_there_are(tmp_path: Path) -> None:
    rows = RunSummary(of_sites(tmp_path / "run", "fedavg", {f"site{k}": 1.0 * k for k in range(40)})).table.rows
    assert (len(rows), rows[-1][0]) == (8, "... more in the report")


def test_clients_have_the_rounds_of_their_own_last_evaluations_next_to_the_servers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    line = {"kind": "test", "metrics": {"accuracy": 60.0}}
    measured = [("server", 0), ("server", 4), ("image-0", 3), ("image-1", 2), ("image-1", 5), ("text-0", 4)]
    write_lines(folder / "metrics.jsonl", [line | {"participant": who, "round": at} for who, at in measured])
    note = "Percent. Server: model of round 4, the last. Clients: after their own last evaluation (round 3 to 5)."
    assert RunSummary(records(folder)).table.notes[0] == note
    assert note[-33:] in RunComparison.of([records(folder)]).table.notes[1]


def test_commands_can_be_typed_as_they_stand(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    _, evaluate, export = dict(RunSummary(run_of(folder, "creamfl")).next_steps(folder)).values()
    assert (evaluate, export) == (f"polyfed evaluate '{folder}' --data shop", f"polyfed export '{folder}'")


def test_chances_of_clients_are_averaged_as_their_figures_are(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_measured(folder, {"a": accurate(90.0, 90.0), "b": accurate(70.0, 50.0)})
    assert "is 80.00 %, 1.1 times chance (70.00 %)" in RunSummary(records(folder)).verdict
    write_measured(folder, {"a": {"r1_sum": 20.0, "x_to_y_r@1": 9.0, "y_to_x_r@1": 11.0}}, 13)
    judged = RunSummary(records(folder)).clients_headline
    assert (judged.meaning, judged.unit) == ("The sum of R@1 of the one client that has it", " of 200")


FOLDS = {"image_to_text_r@1_5fold": 2.0, "gallery_text_5fold": 100.0, "image_to_text_positives_per_query_5fold": 1.0}
MANY = FEW | {"n": 10_000.0}


def measured_line(metrics: Metrics, number: int = 1, kind: str = "test", participant: str = "server") -> Any:
    return {"round": number, "participant": participant, "kind": kind, "metrics": metrics}


def course(*values: float, kind: str = "validation") -> list[dict[str, Any]]:
    return [measured_line(MANY | {"accuracy": value}, number, kind) for number, value in enumerate(values)]


def teaching(ensemble: float, held_out: float = 50.0) -> dict[str, Any]:
    return measured_line({"student.r1_sum": 40.0, "teacher.r1_sum": ensemble, "teacher.gallery": held_out}, 4, "train")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([measured_line(FEW)], "100 test items cannot separate 54.00 % from chance, about 597 could"),
        ([measured_line(MANY)], ""),
        ([measured_line(FEW | {"accuracy": 50.0 + 1e-13})], "nothing was learnt in"),
        ([measured_line(FEW | {"accuracy": 49.0})], "nothing was learnt in"),
        ([*course(50, 54, 56, 58, 60), measured_line(MANY, 4)], "validation still rises (58.00, then 60.00): --rounds"),
        ([*course(50, 54, 60, 58, 60), measured_line(MANY, 4)], ""),
        ([*course(50, 54, 60), measured_line(MANY, 2)], ""),
        (course(50, 54, 56, 58, kind="test"), "test still rises"),
        ([measured_line(MANY, 4), teaching(30.0)], "ensemble ranks below the server (r1_sum 30.00 against 40.00)"),
        ([measured_line(MANY, 4), teaching(50.0)], ""),
        ([measured_line(MANY, 4), teaching(30.0, held_out=0.0)], ""),
        ([measured_line(FEW | {"accuracy": 49.0}, participant="image-0")], "nothing was learnt"),
        ([], ""),
        ([measured_line(FOLDS) | {"intervals": {"image_to_text_r@1_5fold": [0.0, 5.0]}}], ""),
    ],
)
def test_the_first_condition_that_holds_decides(tmp_path: Path, lines: list[dict[str, Any]], expected: str) -> None:
    folder = write_run(tmp_path / "run")
    write_lines(folder / "metrics.jsonl", lines)
    message = RunSummary(RunRecords.load(folder)).advice
    assert expected in message
    assert bool(message) == bool(expected)
