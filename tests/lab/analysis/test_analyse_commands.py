"""``polyfed analyse``: its output, files, and errors of bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure
from papers.fedcola.centres import Centres
from PIL import Image

from polyfed.cli.analyse import show_result
from polyfed.core.errors import RunError
from polyfed.lab.analysis.analysis import AnalysisResult
from polyfed.lab.analysis.leakage import Leakage
from polyfed.reporting.tables import TextTable

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(three_groups: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(three_groups))
    return path


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, but an empty image is written: the tests of legends render these."""

    def save(drawing: Figure, path: Path) -> Path:
        Image.new("L", (1, 1)).save(path)
        return path

    monkeypatch.setattr("polyfed.reporting.figures.save", save)


def read(path: Path | str) -> dict[str, Any]:
    return dict(json.loads(Path(path).read_text()))


def written(name: str) -> dict[str, Any]:
    """Content of the JSON file, which has an image next to it."""
    path = Path(f"there/{name}.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
    assert path.stat().st_size < 300_000
    return read(f"there/{name}.json")


# ---- what is asked

RUN, EXCHANGE = "tiny_run", "fedafd_run"


def test_all_are_listed_with_their_settings(analyse: Cli) -> None:
    code, out, _ = analyse()
    assert code == 0
    names = {line.partition(":")[0] for line in out.splitlines() if line[0] != " "}
    assert names == {"cost", "leakage", "partition", "those of papers"}
    assert "  model=last: " in out


@pytest.mark.usefixtures("unrendered")
def test_an_analysis_prints_tables_and_writes_its_answer_and_a_figure(analyse: Cli, tiny_run: Path) -> None:
    code, out, err = analyse("partition", tiny_run, "--out", "there")
    assert (code, err) == (0, "")
    assert "paired-0" in out
    assert written("partition")


@pytest.mark.slow
def test_cost(analyse: Cli, config: Path) -> None:
    code, out, err = analyse("cost", config, "--set", "algorithm.name=local", "--set", "run.rounds=1", "--out", "there")
    assert (code, err, "GFLOP" in out) == (0, "", True)
    measured = {cost["kind"]: cost for cost in read("there/cost.json")["costs"]}
    assert measured["image"]["flops"] > 0 < measured["image"]["size"]["trained"]


# ---- who holds what


def test_partition_needs_no_training(analyse: Cli, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.data.views.pixels.Pixels.open", lambda *_: pytest.fail("an image was decoded"))
    tiny["clients"]["image"] |= {"count": 3, "test": "dealt"}
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny))
    dealt = '{"name": "natural", "of": ["topic", "label"]}'
    code, out, err = analyse("partition", "tiny.yaml", "--set", f"clients.image.partition={dealt}", "--out", "there")
    assert (code, err) == (0, "")
    assert "image: items by column" in out
    assert "paired: sizes" in out
    holdings = written("partition")
    assert set(holdings) == {"paired-0", "paired-1", "image-0", "image-1", "image-2"}
    images = [holdings[f"image-{k}"] for k in range(3)]
    assert sum(entry["items"] for entry in images) == 24
    assert sum(entry["test"]["items"] for entry in images) == 8
    assert all(sum(entry["columns"]["topic"].values()) == entry["items"] for entry in images)
    assert not any("index" in entry or "index" in (entry["test"] or {}) for entry in holdings.values())


# ---- bad input

REFUSALS = [
    ("nothing RUN", "no analysis 'nothing'; valid: cost, leakage, partition; those of a paper"),
    ("leakage", "analyse leakage: give the folder of a run"),
    ("leakage nothing", "is not a run folder"),
    (f"leakage {RUN} split", "--set split: needs the form KEY=VALUE"),
    (f"leakage {RUN} --out CONFIG", "cannot create folder"),
    (f"leakage {RUN} --device warp", "'warp' is not usable here"),
    (f"leakage {RUN} {EXCHANGE}", "analysis 'leakage' takes one run, not 2; give one at a time"),
    (f"leakage {RUN} samples=x", "samples: Input should be a valid integer"),
    ("cost nothing", "no preset or file 'nothing'"),
    (f"partition {RUN} run.seed=1", "is a run that is over; give its config.yaml instead"),
    ("partition .", "'.' is not a run folder"),
    ("partition BEGUN", "has no partition.json"),
    ("partition CONFIG clients={}", "has no clients of its own to deal items out to"),
    ("partition CONFIG clients.image.partition={name:_iid,of:_[lable]}", "image.partition.of: 'lable'"),
    ("partition no-such-preset", "no preset or file 'no-such-preset'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_bad_input_is_named_before_any_work(
    analyse: Cli, config: Path, request: pytest.FixtureRequest, arguments: str, message: str
) -> None:
    Path("BEGUN").mkdir()
    Path("BEGUN/config.yaml").write_text("name: begun\n")
    command, *words = arguments.split()
    positions: dict[str, Any] = {name: request.getfixturevalue(name) for name in (RUN, EXCHANGE) if name in words}
    positions |= {"CONFIG": config}
    call: list[Any] = []
    for word in words:
        is_setting = "=" in word or (word == "split" and "leakage" in command)
        call += ["--set", word.replace(":_", ": ")] if is_setting else [positions.get(word, word)]
    out = [] if "--out" in words else ["--out", "there"]
    code, printed, err = analyse(command, *call, *out)
    assert (code, printed) == (2, "")
    assert (message in err, err.count("\n")) == (True, 1), err
    assert not list(Path("there").glob("*"))
    assert not Path("cells").exists()


def test_results_are_seen_where_they_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").write_text("a file")
    result = AnalysisResult({"loss": 1.5}, [TextTable("Hours of work", ("", "value"), [("loss", "1.5")])])
    with pytest.raises(RunError, match="cannot write"):
        show_result(result, tmp_path / "none", "there")
    assert "Hours of work" in capsys.readouterr().out


def test_a_name_has_the_settings_that_differ() -> None:
    assert Centres(split="test", model="last").stem == "centres"
    assert Centres(samples=5, model="best").stem == "centres-samples5-modelbest"
    assert Centres(data=["a", "b"]).stem == "centres-dataa,b"
    assert Leakage(clients=7).stem == "leakage"  # which the run's own reports show


def test_settings_that_no_file_name_can_have_stand_there_as_digests() -> None:
    given = [[name] for name in ("a/b", "a_b", "../a", "a\0", "ä", "CON:", "x" * 300)]
    given += [[f"d{number}" for number in range(count)] for count in (99, 100)]
    names = [Centres(data=data).stem for data in given]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and "/" not in name and len(name) <= 150 for name in names)
