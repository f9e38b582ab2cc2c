"""``polyfed analyse FILE.py:Class``: the papers' own analyses, as any others, and columns of studies that name them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paper_studies import STUDIES
from polyfed.core.errors import ConfigError
from polyfed.lab.analysis.analysis import analysis_class
from polyfed.lab.studies.columns.metrics import AnalysisColumn
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.study_files import study_content
from polyfed.runs.opened import open_run

Cli = Callable[..., tuple[int, str, str]]
PAPERS = Path(__file__).parents[2] / "papers"
RUN, EXCHANGE, LAYERS = "tiny_run", "fedafd_run", "fedavg_run"
DRIFT, FEATURES, LANDSCAPE = "creamfl/drift.py:Drift", "fedafd/features.py:Features", "fedcola/landscape.py:Landscape"
CENTRES, WEIGHTS = "fedcola/centres.py:Centres", "fedafd/weights.py:Weights"
RETRAIN, DISTORTION = "fedaid/retraining.py:Retrain", "fedaid/retraining.py:Distortion"


@pytest.fixture
def analyse(cli: Cli, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs ``polyfed analyse`` of a paper's file and a fixture's run; drawings are made, but empty files written."""
    monkeypatch.setattr("polyfed.reporting.figures.save", lambda drawing, path: path.touch() or path)

    def call(name: str, run: str, *settings: str) -> tuple[int, str, str]:
        given = [word for setting in settings for word in ("--set", setting)]
        folder = request.getfixturevalue(run) if run in (RUN, EXCHANGE, LAYERS) else run
        return cli("analyse", PAPERS / name, folder, *given, "--out", "there")

    return call


@pytest.mark.parametrize(
    ("name", "run", "settings"),
    [
        (LANDSCAPE, RUN, ["samples=16", "grid=3", "steps=8"]),
        (CENTRES, RUN, ["samples=8"]),
        (WEIGHTS, EXCHANGE, ["round=1", "samples=3"]),
        (DRIFT, EXCHANGE, ["samples=8", "method=pca"]),
        (FEATURES, EXCHANGE, ["client=image", "method=pca"]),
        (RETRAIN, LAYERS, ["layers=shallow", "depth=image=2,text=1", "on=union", "steps=2"]),
        (DISTORTION, LAYERS, ["steps=1", "lr=0.001", "seed=3"]),
    ],
)
def test_a_file_of_a_paper_is_an_analysis(analyse: Cli, name: str, run: str, settings: list[str]) -> None:
    code, out, err = analyse(name, run, *settings)
    assert (code, err) == (0, "")
    stem = "-".join([name.partition(":")[2].lower(), *(setting.replace("=", "", 1) for setting in settings)])
    assert out.count("\n") > 3
    answer = json.loads(Path(f"there/{stem}.json").read_text())
    given = {key: value for key, _, value in (setting.partition("=") for setting in settings)}
    assert {key: str(answer[key]) for key in given if isinstance(answer.get(key), int | str)}.items() <= given.items()
    assert Path(f"there/{stem}.png").is_file()


@pytest.mark.parametrize(
    ("name", "run", "settings", "message"),
    [
        (LANDSCAPE, RUN, ["grid=10"], "grid 10 has no middle"),
        (LANDSCAPE, RUN, ["extent=0"], "extent 0.0 must be positive"),
        (LANDSCAPE, RUN, ["steps=1"], "in 1 steps"),
        (CENTRES, RUN, ["data=[scenes,privat]"], "did you mean 'private'"),
        (CENTRES, RUN, ["data=[scenes,scenes]"], "'scenes' is named 2 times"),
        (CENTRES, RUN, ["split=dev"], "no split 'dev'"),
        (WEIGHTS, RUN, [], "has no aggregation weights"),
        (WEIGHTS, EXCHANGE, ["round=9"], "lacks weights; valid: 1"),
        (DRIFT, RUN, [], "clients of 'fedavg' keep no model"),
        (DRIFT, EXCHANGE, ["model=worst"], "has no model 'worst'"),
        (DRIFT, EXCHANGE, ["sample=9"], "unknown key 'sample'; did you mean 'samples'?"),
        (DRIFT, "nothing", [], "is not a run folder"),
        (FEATURES, EXCHANGE, ["client=paired-1"], "not client 'paired-1' of"),
        (FEATURES, EXCHANGE, ["client=images"], "no client 'images' took part"),
        (FEATURES, EXCHANGE, ["method=umap"], "Input should be 'tsne' or 'pca'"),
        (RETRAIN, LAYERS, ["depth=image=x"], "depth image=x: 'image=x' has no number of layers"),
        (RETRAIN, LAYERS, ["layers=top"], "layers top; "),
        (RETRAIN, LAYERS, ["on=paired-2"], "did you mean 'paired-"),
        (RETRAIN, LAYERS, ["on=image"], "on image: no client of the task of 'server'"),
        (RETRAIN, LAYERS, ["of=each"], "keep no models; give of server"),
        (DISTORTION, LAYERS, ["of=image"], "encodes 'image' only"),
        ("fedaid/none.py:Retrain", LAYERS, [], "No such file or directory"),
        ("fedaid/retraining.py:Retry", LAYERS, [], "has no attribute 'Retry'; give FILE.py:Class"),
        ("fedaid/retraining.py:Plan", LAYERS, [], "is not a subclass of polyfed.lab.analysis.analysis.Analysis"),
    ],
)
def test_refusals(analyse: Cli, name: str, run: str, settings: list[str], message: str) -> None:
    code, printed, err = analyse(name, run, *settings)
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list(Path("there").glob("*"))


# ---- columns of studies


def column(analysis: str | Path, figure: str = "samples", **options: Any) -> AnalysisColumn:
    return AnalysisColumn(analysis=str(analysis), figure=figure, options=options)


def test_a_column_names_a_file_next_to_the_study(fedafd_run: Path, tmp_path: Path) -> None:
    """Its figure is known by class and code, wherever the file lies, and what was saved by other code is not taken."""
    positions = [tmp_path / "here" / "drift.py", tmp_path / "there" / "drift.py"]
    for place in positions:
        place.parent.mkdir()
        shutil.copy(PAPERS / "creamfl" / "drift.py", place)
    content = {"title": "t", "base": "x", "rows": {"a": {}}}
    content["columns"] = {"seen": {"name": "analysis", "analysis": "drift.py:Drift", "figure": "samples"}}
    (tmp_path / "here" / "study.yaml").write_text(yaml.safe_dump(content))
    named = Study.load(tmp_path / "here" / "study.yaml").columns["seen"]
    assert isinstance(named, AnalysisColumn)
    assert named.analysis == f"{positions[0]}:Drift"
    assert named.digest == column(f"{positions[1]}:Drift").digest != column(f"{positions[1]}:Drift", samples=9).digest
    run = open_run(Path(shutil.copytree(fedafd_run, tmp_path / "run")))
    few = column(f"{positions[0]}:Drift", samples=9, method="pca")
    assert not few.is_at_hand(run.folder)
    assert few.measure(run) == 9
    assert few.is_at_hand(run.folder)
    positions[1].write_text(positions[1].read_text() + "# edited\n")
    assert not column(f"{positions[1]}:Drift", samples=9, method="pca").is_at_hand(run.folder)


def test_results_are_read_where_the_file_is_not(tmp_path: Path) -> None:
    content = {"title": "t", "base": "x", "rows": {"a": {}}, "seeds": 1}
    content["columns"] = {"seen": {"name": "analysis", "analysis": "gone.py:Gone", "figure": "x"}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    study = Study.load(tmp_path / "study.yaml")
    Results(study, {("a", (), "seen"): {0: 1.0}}).save(tmp_path)
    assert Results.load(tmp_path).at("a", (), "seen") == {0: 1.0}
    with pytest.raises(ConfigError, match=r"cannot read '.*gone\.py:Gone'"):
        study.columns["seen"].require(None)  # type: ignore[arg-type]


def test_a_file_imports_from_its_folder_and_from_above(tmp_path: Path) -> None:
    (tmp_path / "above_it.py").write_text("from polyfed.lab.analysis.analysis import Analysis as Above\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "mine.py").write_text("from above_it import Above\n\nclass Mine(Above): ...\n")
    before = list(sys.path)
    assert analysis_class(f"{tmp_path}/below/mine.py:Mine").title() == "mine"
    assert sys.path == before


def test_a_handed_over_folder_runs_no_file(tmp_path: Path) -> None:
    from polyfed.core.untrusted import code_of

    (tmp_path / "mine.py").write_text("raise SystemExit\n")
    with code_of(tmp_path, False), pytest.raises(ConfigError, match="names code"):
        analysis_class(f"{tmp_path}/mine.py:Mine")


@pytest.mark.parametrize("scale", ["small", "paper", "smoke"])
def test_studies_of_papers_name_analyses_that_there_are(scale: str) -> None:
    """With settings that they have: a study itself loads whatever it names."""
    named = set()
    for path in STUDIES.values():
        scales = {"small", "smoke", *(study_content(path).get("scales") or ())}
        if "analysis:" in path.read_text() and scale in scales:
            study = Study.load(path, scale)
            for row in study.rows:
                for own in study.columns_of(row).values():
                    if isinstance(own, AnalysisColumn):
                        own.require(None)  # type: ignore[arg-type]
                        named.add(own.asked.title())
    assert named >= {"drift", "features", "landscape", "retrain", "distortion", "centres", "weights"}
