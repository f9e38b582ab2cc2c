"""The command line: commands, their options and errors."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from PIL import Image
from rich.console import Console

from polyfed.cli.console import forget_working_folder
from polyfed.cli.main import main
from polyfed.cli.options import ExperimentOptions
from polyfed.core.version import __version__
from polyfed.reporting.progress import LiveProgress
from polyfed.runs.events import follow
from polyfed.runs.experiment import Experiment
from polyfed.runs.loop import Loop
from polyfed.runs.records import RunRecords
from polyfed.runs.session import Session

Cli = Callable[..., tuple[int, str, str]]
NOWHERE = "data.sources.private={name: parquet, path: nowhere, columns: {image: image}, targets: {label: label}}"
Started = list[tuple[Path, Experiment]]


@pytest.fixture
def config(tiny: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny))
    return path


# ---- what it does


def test_a_run_is_shown_and_stored_under_its_name_and_seed(cli: Cli, config: Path) -> None:
    code, out, err = cli("run", config, "--seed", 3, "--set", "run.rounds=1", "--set", "name=mine")
    assert (code, err) == (0, "")
    assert "run folder: runs/mine-seed3" in out
    assert "round 1/1" in out
    assert "times chance" in out or "no better than chance" in out
    assert "Page: runs/mine-seed3/report.html\nNext:\n  polyfed run runs/mine-seed3/config.yaml --twin" in out
    stored = yaml.safe_load(Path("runs/mine-seed3/config.yaml").read_text())
    assert (stored["run"]["seed"], stored["run"]["rounds"]) == (3, 1)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Experiments that would be run, and their folders."""
    runs: Started = []
    monkeypatch.setattr("polyfed.reporting.api.run", lambda one, folder, callbacks: runs.append((folder, one)))
    return runs


def test_seeds_are_runs_in_turn_and_short_options_are_settings(cli: Cli, config: Path, started: Started) -> None:
    assert cli("run", config, "--seeds", "1,4", "--rounds", 1, "--device", "cpu", "--out", "mine")[0] == 0
    begun = [(str(folder), experiment.run.seed) for folder, experiment in started]
    assert begun == [("mine-seed1", 1), ("mine-seed4", 4)]
    assert all((experiment.run.rounds, experiment.run.device) == (1, "cpu") for _, experiment in started)


def test_a_second_run_gets_a_folder_of_its_own(cli: Cli, config: Path, started: Started) -> None:
    for number in ("", "-2", "-3"):
        Path(f"runs/tiny-seed0{number}").mkdir(parents=True)
    assert cli("run", config)[0] == 0
    assert [str(folder) for folder, _ in started] == ["runs/tiny-seed0-4"]


def test_folders_of_data_and_weights_are_absolute(cli: Cli, config: Path, tmp_path: Path, started: Started) -> None:
    odd = Path("da ta: [1]")
    odd.mkdir()
    assert cli("run", config, "--data-dir", odd, "--weights-dir", odd)[0] == 0
    ((_, experiment),) = started
    assert experiment.data.dir == experiment.data.weights_dir == tmp_path / "work" / odd


def test_evaluation_shows_recalls_with_their_galleries(cli: Cli, tiny_run: Path) -> None:
    code, out, err = cli("evaluate", tiny_run, "--data", "scenes", "--model", "last")
    assert (code, err) == (0, "")
    assert "scenes, test: 12 items, 60 samples; last model of round 1" in out
    assert next(line for line in out.splitlines() if "image to text R@10" in line).split()[-3::2] == ["60", "5"]
    assert "r1_sum" in out
    content = json.loads(cli("evaluate", tiny_run, "--data", "scenes", "--split", "validation", "--json")[1])
    assert (content["data"], content["split"], content["items"]) == ("scenes", "validation", 12)
    assert content["metrics"]["gallery_text"] == 60


def test_a_classifier_is_evaluated_without_recalls(cli: Cli, classifier_run: Path) -> None:
    code, out, _ = cli("evaluate", classifier_run, "--data", "private")
    assert code == 0
    assert "accuracy" in out
    assert "Measured with n 8, classes 18" in out
    assert "R@" not in out


def test_runs_are_compared_and_drawn(cli: Cli, tiny_run: Path, classifier_run: Path) -> None:
    code, out, _ = cli("compare", tiny_run, classifier_run, "--plot", "curves.png")
    assert code == 0
    assert all(part in out for part in ("Comparison", "server r1_sum", "drawn: curves.png"))
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    assert "Paired differences against" in out
    rows = json.loads(cli("compare", tiny_run, tiny_run, "--json")[1])
    assert [(row["seeds"], row["paired_differences"]) for row in rows] == [(2, [])]
    code, out, _ = cli("compare", tiny_run, classifier_run, "--against", classifier_run, "--json")
    first, reference = json.loads(out)
    assert (code, reference["paired_differences"]) == (0, [])
    assert {(one["figure"], tuple(one["seeds"])) for one in first["paired_differences"]} == {("image accuracy", (0,))}


def test_a_twin_is_run_and_its_configuration_runs_it_again(cli: Cli, config: Path) -> None:
    code, out, _ = cli("run", config, "--twin", "server-only", "--rounds", 1, "--set", "public.items=6")
    assert (code, out.count("round 1/1")) == (0, 1)
    folder = Path("runs/tiny-server-only-seed0")
    records = RunRecords.load(folder)
    assert (records.config["twin"], records.config["clients"]) == ({"kind": "server-only", "of": "tiny"}, {})
    assert cli("run", folder / "config.yaml", "--out", "again")[0] == 0
    assert Path("again/metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert cli("run", config, "--twin", "global")[0] == 2
    assert cli("run", folder / "config.yaml", "--twin", "local")[::2] == (
        2,
        "error: twin: this is a twin of 'tiny' already; give that experiment itself\n",
    )


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version")[:2] == (0, f"polyfed {__version__}\n")
    code, out, err = cli()
    assert (code, "Usage: polyfed" in out, err) == (2, True, "error: 'polyfed' needs one of these commands\n")
    code, out, err = cli("study")
    assert (code, "show" in out, err) == (2, True, "error: 'polyfed study' needs one of these commands\n")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("run demo --seed 1 --set run.rounds=1 --seed 2 --set run.threads=1", "--seed"),
        ("init own.yaml --texts a.txt --rounds 3 --rounds 5", "--rounds"),
        ("study run mine.yaml --out a --out=b", "--out"),
    ],
)
def test_an_option_of_one_value_is_refused_when_it_is_given_twice(cli: Cli, arguments: str, option: str) -> None:
    assert cli(*arguments.split()) == (2, "", f"error: {option} is given 2 times; give it once\n")


def test_answers_do_not_wait_for_what_takes_long_to_import() -> None:
    code = (
        "import sys; from polyfed.cli.main import main\n"
        "asked = '--help', 'list', 'list presets', '--version', 'run --help', 'run scenes-demo --set run.rnds=3'\n"
        "for words in asked: main(words.split())\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'transformers', 'matplotlib', 'pydantic'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.slow
def test_runs_are_checked_and_compared_with_the_base_alone(config: Path) -> None:
    code = f"""
import gc, sys
sys.modules |= dict.fromkeys(("scipy", "datasets"))
from polyfed.cli.main import main
codes = [main(["run", "{config}", "--dry-run"]), {{"transformers", "matplotlib"}} & set(sys.modules)]
codes.append(gc.isenabled() and gc.get_freeze_count() > 100_000)
from polyfed.runs import environment
environment.PACKAGES += ("absent",)
codes += [main(["run", "{config}", "--rounds", "1", "--out", "0"])]
sys.modules["pandas"] = None  # after pyarrow has looked for it, which does not bear this
print(*codes, main(["compare", "0", "0", "--plot", "compared.png"]))
from polyfed import open_run
open_run("0").to_pandas()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=config.parent)
    assert done.stdout.splitlines()[-1] == "0 set() True 0 0"
    assert done.stderr.splitlines()[-1].endswith('pip install "polyfed[frames]"')


# ---- interruptions and surprises


def test_an_interrupted_run_names_what_continues(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "round", Mock(side_effect=KeyboardInterrupt))
        code, _, err = cli("run", config, "--out", "here")
    assert (code, err) == (130, "interrupted; continue with: polyfed resume here\n")
    code, out, err = cli("resume", "here")
    assert (code, err) == (0, "")
    assert "round 2/2" in out


def test_the_demo_runs_its_server_alone_and_continues(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(content | {"run": content["run"] | {"output": {"plots": "page"}}}))
    monkeypatch.setattr("polyfed.cli.running.DEMO", str(config))

    def interrupt(loop: Loop, number: int) -> None:
        if loop.experiment.twin is None:
            raise KeyboardInterrupt
        rounds(loop, number)

    with monkeypatch.context() as patch:
        rounds = Loop.round
        patch.setattr(Loop, "round", interrupt)
        code, out, err = cli("demo")
    assert (code, err) == (130, "interrupted; continue with: polyfed demo --out runs/demo\n")
    assert ("run folder: runs/demo/server-alone" in out, "next" in out) == (True, False)
    code, out, err = cli("demo", "--out", "runs/demo")
    assert (code, err) == (0, "")
    assert "tiny-server-only" not in out  # it was finished
    assert ("interval" in out, "Page: runs/demo/federation/report.html" in out) == (True, True)
    steps = out.partition("Next:\n")[2]
    assert all(line.startswith("  polyfed ") for line in steps.splitlines())
    seeds = re.findall(r"  polyfed run (\S+)/config.yaml --seeds 1,2,3,4\n", steps)
    alone, federation = (RunRecords.load(Path(folder)) for folder in seeds)
    assert (federation.name, alone.config["twin"]["of"]) == ("federation", "tiny")
    assert [run.config["run"]["output"]["plots"] for run in (federation, alone)] == ["page", False]
    assert not (federation.folder / "plots").exists()
    assert cli("demo", "--out", "runs/demo")[1].partition("Next:\n")[2] == steps
    shutil.copytree("runs/demo/federation", "other/server-alone")
    refused = "error: --out: other/server-alone is a run of 'tiny', not of the demo; choose another --out\n"
    assert cli("demo", "--out", "other")[::2] == (2, refused)


def test_two_sites_are_run_alone_and_together_with_their_gain(cli: Cli, config: Path, tiny: dict[str, Any]) -> None:
    image, own = tiny["clients"]["image"], tiny["data"]["sources"]["private"]
    sites = {"north": own, "south": own | {"seed": 5}}
    clients = {name: image | {"source": name} for name in sites}
    data = {"sources": sites | {"spare": {"name": "folder", "path": str(Path("spare.csv").absolute())}}}
    config.write_text(yaml.safe_dump(tiny | {"data": data, "clients": clients, "public": None, "server": None}))
    _, out, _ = cli("run", config, "--rounds", 1, "--out", "here")
    assert "Next:\n  polyfed run here/config.yaml --twin local --out here-local\n" in out
    code, out, err = cli("run", config, "--with-alone", "--rounds", 1, "--out", "there")
    assert (code, err) == (0, "")
    assert out.count("taking part brings ") == 1
    assert re.search(r"north: accuracy +\d+\.\d\d +\d+\.\d\d +[+-]\d+\.\d \(-?[\d.]+ to ", out)
    assert 'id="gain"' in Path("there/report.html").read_text()
    shutil.rmtree("there")  # as if it was interrupted in between
    assert cli("run", config, "--with-alone", "--rounds", 1, "--out", "there")[0] == 0
    refused = "error: --with-alone: there-local is a run with other settings; choose another --out\n"
    assert cli("run", config, "--with-alone", "--out", "there")[::2] == (2, refused)
    assert cli("run", config, "--with-alone", "--twin", "local")[0] == 2


def test_interruptions_leave_nothing_and_defects_show(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "attach", Mock(side_effect=[KeyboardInterrupt, ZeroDivisionError]))
    assert cli("run", config, "--out", "here")[::2] == (130, "interrupted; nothing was written\n")
    assert not Path("here").exists()
    with pytest.raises(ZeroDivisionError):
        cli("run", config)


def test_warnings_of_the_library_are_plain_lines(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds() -> dict[str, str]:
        logging.getLogger("polyfed.data").warning("an image of %s is odd", "row 3")
        logging.getLogger("polyfed.runs.session").warning("is shown as an event of the run")
        return {}

    monkeypatch.setattr("polyfed.cli.catalogue.kinds", kinds)
    assert cli("list")[::2] == (0, "warning: an image of row 3 is odd\n")
    assert not logging.getLogger("polyfed").handlers  # later users of the library are not shown them


# ---- what a user can get wrong: one line, exit code 2, nothing written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["run.rouns=3"], "run: unknown key 'rouns'; did you mean 'rounds'?"),
        (["run.device=warp"], "run.device 'warp' is not usable here"),
        (["server.test_split=train"], "the public set shares 16 items with 'scenes' train"),
        ([NOWHERE], "no data folder is set"),
    ],
)
def test_bad_settings(cli: Cli, config: Path, changes: list[str], message: str) -> None:
    code, _, err = cli("run", config, "--out", "here", *[part for change in changes for part in ("--set", change)])
    assert_refused(code, err, message)
    assert not Path("here").exists()


def test_an_out_folder_that_exists(cli: Cli, config: Path) -> None:
    Path("here").mkdir()
    Path("here/mine").write_text("kept")
    code, out, err = cli("run", config, "--out", "here")
    assert_refused(code, err, "run folder 'here' exists and is not empty")
    assert out == ""  # the folder is named once the run begins
    assert [path.name for path in Path("here").iterdir()] == ["mine"]


@pytest.mark.parametrize("command", [["resume"], ["evaluate", "--data", "scenes"], ["export"]])
def test_an_edited_configuration(cli: Cli, copied: Path, command: list[str]) -> None:
    config = copied / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    before = sorted(path.name for path in copied.iterdir())
    code, _, err = cli(command[0], copied, *command[1:])
    assert_refused(code, err, "was edited after the run had started")
    assert sorted(path.name for path in copied.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "RUN", "--data", "nowhere"], "neither a source of the run nor a folder"),
        (["evaluate", "RUN", "--data", "scenes", "--model", "bset"], "has no model 'bset'; it has: best (round"),
        (["evaluate", "RUN", "--data", "scenes", "--column", "image"], "--column image: needs the form NAME=COLUMN"),
        (["evaluate", "RUN", "--data", "scenes", "--data-dir", "nowhere"], "'nowhere' does not exist"),
        (["evaluate", "RUN"], "Missing option '--data'"),
        (["export", "RUN", "--out", "RUN"], "exists and is not empty"),
        (["compare", "RUN", "."], "'.' is not a run folder"),
        (["compare", "RUN", "--metric", "r1_sm"], "of these runs has a metric 'r1_sm'; did you mean 'r1_sum'?"),
        (["compare", "RUN", "--against", "x"], "no run 'x' here to compare against; valid: "),
        (["compare", "RUN", "--kind", "tset"], "'tset' is not a split of evaluations; did you mean 'test'?"),
        (["resume", "."], "is not a run folder"),
        (["run", "scenes-dmeo"], "no preset or file 'scenes-dmeo'; did you mean 'scenes-demo'? polyfed list"),
        (["run", "shop"], "no preset or file 'shop'; did you mean the file 'shop.yaml'?"),
        (["run", "damaged.yaml"], "damaged.yaml'"),
        (["run", "shop.yaml"], "shop.yaml'"),
        (["run", "TINY", "--data-dir", "empty", "--set", NOWHERE], "no folder 'nowhere' under the data folder"),
        (["run", "scenes-demo", "--seed", "1", "--seeds", "1,2"], "exclude each other"),
        (["run", "scenes-demo", "--seeds", "1,x"], "'x' is not a whole number"),
        (["list", "modles"], "cannot list 'modles'; did you mean 'models'?"),
        (["list", "models", "gruu"], "'gruu' is not among models; did you mean 'gru'?"),
        (["rnu"], "No such command 'rnu'"),
        (["run"], "Missing argument"),
        (["run", "scenes-demo", "--sed", "1"], "No such option"),
    ],
)
def test_bad_arguments(cli: Cli, config: Path, tiny_run: Path, arguments: list[str], message: str) -> None:
    Path("empty").mkdir()
    for name, text in (("shop", "just words"), ("damaged", "a: [")):
        Path(f"{name}.yaml").write_text(text)
    before = sorted(Path().rglob("*"))
    spots = {"RUN": str(tiny_run), "TINY": str(config)}
    code, out, err = cli(*(spots.get(part, part) for part in arguments))
    assert_refused(code, err, message)
    assert out == ""
    assert sorted(Path().rglob("*")) == before


def assert_refused(code: int, err: str, message: str) -> None:
    assert code == 2
    *dropped, line = err.splitlines()  # settings of a component that --set replaces
    assert line.startswith("error: ")
    assert message in line
    assert all("are dropped" in other for other in dropped)


def test_settings_of_an_engine_go_with_the_option_that_names_it() -> None:
    settings = ExperimentOptions(overrides=["run.engine.address=auto", "run.engine.workers=3"])
    engine = settings.load("scenes-demo", {"run.engine.name": "ray", "run.rounds": 4}).run.engine
    assert engine.model_dump() | {"name": "ray", "address": "auto", "workers": 3} == engine.model_dump()


def test_likely_words_are_named_once_and_remedies_are_existing_options(cli: Cli) -> None:
    assert cli("rnu", "x.yaml")[2] == "error: No such command 'rnu'. Did you mean 'run'?\n"
    assert cli("deploy", "chekc")[2].count("Did you mean") == 1
    Path("photos").mkdir()
    for number in range(20):
        Image.new("RGB", (8, 8)).save(f"photos/{number}.png")
    lines = "".join(f"{number}.png,dog {number}\n" for number in range(20))
    Path("photos/captions.csv").write_text(f"quelle,caption\n{lines}".replace(".png", "-scan"))
    for command in (("init", "x.yaml", "--pairs", "photos"), ("prepare", "photos", "out")):
        assert "name it in file_column (--file-column)" in cli(*command)[2]
        code, _, err = cli(*command, "--file-column", "quele")
        assert (code, "no column 'quele' (file_column, --file-column); did you mean 'quelle'" in err) == (2, True)


@pytest.mark.slow  # a process that starts; the test below follows a log to its end in this one
def test_a_run_is_watched_to_its_end(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, height=30, color_system=None)
    monkeypatch.setattr("polyfed.cli.running.terminal", lambda: console)
    command = [sys.executable, "-m", "polyfed", "run", "tiny.yaml", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "run" / "metrics.jsonl").exists():  # measurements that the log repeats
            assert process.poll() is None
            time.sleep(0.05)
        assert main(["watch", str(tmp_path / "run")]) == 0
        assert process.wait() == 0
    text = shown.getvalue()
    assert "tiny" in text
    assert "report.html" in text[text.index("\x1b[?25h") :]


def test_a_log_is_shown_to_its_end(tiny_run: Path, tmp_path: Path) -> None:
    calls = [
        {"event": "RunStarted", "name": "tiny", "rounds": 1, "clients": 3, "done": 0},
        {"event": "Measured", "round": 0, "participant": "server", "kind": "train", "metrics": {"loss": 1.0}},
        {"event": "RoundStarted", "round": 1, "cohort": ["paired-0"]},
        {"event": "RunComplete"},
    ]
    log, stream = tmp_path / "progress.jsonl", io.StringIO()
    log.write_text("".join(json.dumps({"at": 1.0 + k, **call}) + "\n" for k, call in enumerate(calls)))
    progress = LiveProgress(Console(file=stream, force_terminal=True, width=100))
    assert follow(log, progress, tiny_run, finished=lambda: True)
    progress.close()
    assert "tiny: 1 rounds, 3 clients" in stream.getvalue()
    assert "report.html" in stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "planted.py").write_text("open('ran', 'w').close()\n")
    (tmp_path / "config.yaml").write_text("extends: scenes-demo\nalgorithm: planted.Method\n")
    return tmp_path


@pytest.mark.slow
def test_modules_of_the_working_folder_are_not_imported(folder: Path) -> None:
    command = [sys.executable, "-m", "polyfed", "run", "config.yaml", "--out", "out"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot import 'planted.Method'" in done.stderr
    assert not (folder / "ran").exists()
    assert not (folder / "out").exists()


def test_what_is_put_on_the_path_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [str(folder), str(folder), "others"])  # the first is of ``python -m``
    forget_working_folder()
    assert sys.path == [str(folder), "others"]
