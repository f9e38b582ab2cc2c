"""Folders from elsewhere run no code when they are opened, from Python or the command line."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

import polyfed
from grids import mostly_slow
from paper_studies import STUDIES
from polyfed import evaluate_model, export_model, load_model, open_run
from polyfed.core.errors import ConfigError, PolyfedError
from polyfed.export.model import export_hugging_face
from polyfed.lab.analysis.leakage import Simulated
from polyfed.lab.downstream.suite import opened_model
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from polyfed.reporting.gallery import write_gallery
from run_folders import redigested

PAPERS = Path(__file__).parents[2] / "papers"
MODULE = """\
from pathlib import Path
from polyfed.algorithms.fedavg import FedAvg
from polyfed.data.sources.scenes import Scenes
from polyfed.data.views.pixels import Pixels
from polyfed.models.encoders.resnet import ResNet
from polyfed.lab.studies.columns.metrics import Metric
from polyfed.tasks.retrieval import PairRetrieval

Path(__file__).with_name("ran").touch()
class A(FedAvg): pass
class E(ResNet): pass
class S(Scenes): pass
class T(PairRetrieval): pass
class V(Pixels): pass
class C(Metric): pass
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the module of a folder writes when it is imported."""
    (tmp_path / "evilmod.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "ran"
    sys.modules.pop("evilmod", None)


def renamed(content: Any, path: str, name: str) -> Any:
    """The content with another name of the component at a path."""
    *above, last = path.split(".")
    section = reduce(lambda part, key: part[int(key)] if key.isdigit() else part[key], above, content)
    component = section[last]
    section[last] = {**component, "name": name} if isinstance(component, dict) else name
    return content


def with_config(folder: Path, path: str, name: str) -> Path:
    """A run whose configuration names a class, with the digest made to fit."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(renamed(yaml.safe_load(file.read_text()), path, name)))
    return redigested(folder)


def with_model(folder: Path, path: str, name: str) -> Path:
    for file in folder.glob("models/*/config.json"):
        file.write_text(json.dumps(renamed(json.loads(file.read_text()), path, name)))
    return folder


METHOD, SERVER_ENCODER = ("algorithm", "evilmod.A"), ("server.model.encoders.image", "evilmod.E")
CONFIGS = (
    METHOD,
    SERVER_ENCODER,
    ("data.sources.scenes", "evilmod.S"),
    ("server.task", "evilmod.T"),
    ("clients.image.models.0.encoders.image", "evilmod.E"),
    ("clients.image.models.0.encoders.image.view", "evilmod.V"),
    ("run.engine", "evilmod.Missing"),
)
ENCODER = ("model.encoders.image", "evilmod.E")
OPENING: dict[str, Callable[[Path, Path], Any]] = {
    "experiment": lambda run, out: open_run(run).experiment,
    "federation": lambda run, out: open_run(run).federation,
    "clients": lambda run, out: open_run(run).clients,
    "model of a client": lambda run, out: load_model(run, "image"),
    "simulated": lambda run, out: Simulated(open_run(run), "last").participants,
    "resume": lambda run, out: polyfed.resume(run),
    "gallery": lambda run, out: write_gallery(open_run(run), out / "page.html"),
    "downstream": lambda run, out: opened_model(open_run(run), client="image"),
}
OF_THE_MODEL: dict[str, Callable[[Path, Path], Any]] = {
    "open_run": lambda run, out: open_run(run).model,
    "load_model": lambda run, out: load_model(run).encode(texts=["a"]),
    "saved model": lambda run, out: open_run(run).server_model("last"),
    "evaluate": lambda run, out: evaluate_model(run, "scenes"),
    "export": lambda run, out: export_model(run, out / "export"),
    "hugging face": lambda run, out: export_hugging_face(run, out / "hf"),
    "downstream": lambda run, out: opened_model(open_run(run)),
}
COMMANDS = (
    "resume RUN",
    "gallery RUN --out OUT/page.html",
    "evaluate RUN --data scenes",
    "downstream RUN --suite scenes --out OUT",
    "export RUN --out OUT/export",
    "export RUN --out OUT/hf --format huggingface",
    f"analyse {PAPERS}/fedcola/centres.py:Centres RUN --out OUT",
    f"analyse {PAPERS}/fedafd/weights.py:Weights RUN --out OUT",
    "analyse leakage RUN --out OUT",
)


@pytest.fixture
def run(copied: Path) -> Path:
    return copied


@pytest.mark.parametrize("way", mostly_slow(OPENING, "experiment", "clients", "resume", "gallery"))
def test_what_the_configuration_of_a_run_names_is_not_imported(run: Path, ran: Path, tmp_path: Path, way: str) -> None:
    for path, name in CONFIGS:
        folder = with_config(Path(shutil.copytree(run, tmp_path / path)), path, name)
        with pytest.raises(ConfigError, match=rf"names code, '{name}'.* pass allow_code=True \(--allow-code\)"):
            OPENING[way](folder, tmp_path)
        assert not ran.exists()
        assert "evilmod" not in sys.modules


@pytest.mark.parametrize("opened", OF_THE_MODEL.values(), ids=OF_THE_MODEL)
def test_what_a_model_names_is_not_imported(run: Path, ran: Path, tmp_path: Path, opened: Any) -> None:
    for path, name in (ENCODER, ("model.encoders.image.view", "evilmod.V"), ("task", "evilmod.T")):
        folder = with_model(Path(shutil.copytree(run, tmp_path / path)), path, name)
        with pytest.raises(ConfigError, match=rf"names code, '{name}'"):
            opened(folder, tmp_path)
        assert not ran.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_import_nothing_either(run: Path, ran: Path, tmp_path: Path, cli: Any, command: str) -> None:
    with_model(run, *ENCODER)
    with_config(run, *SERVER_ENCODER)
    (tmp_path / "out").mkdir()
    code, _, err = cli(*command.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")).split())
    assert (code, err.count("\n")) == (2, 1)
    assert "names code, 'evilmod.E'" in err
    assert not ran.exists()


def test_what_only_shows_records_shows_them(run: Path, ran: Path, tmp_path: Path, cli: Any) -> None:
    with_model(run, *ENCODER)
    with_config(run, *METHOD)
    for command in (["report", run], ["compare", run, run], ["analyse", "partition", run], ["watch", run]):
        assert cli(*command)[0] == 0, command
    assert not ran.exists()


OTHERS = ("os.system", "this.Zen", "polyfed.__main__.main", "polyfed.algorithms.fedprox.FedProx", "a..b", "x.y")


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_other_components_are_not_imported(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("this", "polyfed.__main__", "polyfed.algorithms.fedprox"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with_config(run, "algorithm", name)
    before = set(sys.modules)
    with pytest.raises(ConfigError):
        _ = open_run(run).experiment
    assert set(sys.modules) == before


def test_a_trusted_folder_needs_an_option(run: Path, ran: Path, tmp_path: Path, cli: Any) -> None:
    with_config(with_model(run, *ENCODER), *METHOD)
    assert cli("evaluate", run, "--data", "scenes", "--allow-code")[0] == 0
    assert ran.exists()
    assert type(open_run(run, allow_code=True).experiment.algorithm).__name__ == "A"
    # a class that is imported already is this process's own
    assert type(open_run(run).experiment.algorithm).__name__ == "A"
    sys.modules.pop("evilmod")
    with pytest.raises(ConfigError, match=r"names code, 'evilmod\.A'"):
        polyfed.resume(run)
    assert polyfed.resume(run, allow_code=True).allow_code


def test_an_own_run_needs_no_leave(tiny: dict[str, Any], ran: Path, tmp_path: Path, cli: Any) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(renamed(tiny, "algorithm", "evilmod.A")))
    assert cli("run", tmp_path / "own.yaml", "--rounds", "1", "--out", tmp_path / "own")[0] == 0
    assert ran.exists()
    sys.modules.pop("evilmod")
    assert cli("resume", tmp_path / "own")[0] == 2
    assert cli("resume", tmp_path / "own", "--allow-code")[0] == 0


def test_a_run_extends_no_other_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("description: secret\n")
    content = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(content | {"extends": "../other.yaml"}))
    with_config(run, "name", "here")
    with pytest.raises(ConfigError, match="unknown key 'extends'"):
        _ = open_run(run).experiment


def test_a_study_that_was_handed_over_imports_nothing(ran: Path, tmp_path: Path, cli: Any) -> None:
    Results(Study.load(STUDIES["polyfed/demo"]), {}).save(tmp_path / "study")
    content = yaml.safe_load((tmp_path / "study" / "study.yaml").read_text())
    content["columns"] = {"mine": {"name": "evilmod.C"}}
    (tmp_path / "study" / "study.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"names code, 'evilmod\.C'"):
        Results.load(tmp_path / "study")
    for command in ("show", "export"):
        code, _, err = cli("study", command, tmp_path / "study")
        assert (code, "names code, 'evilmod.C'" in err) == (2, True)
    assert not ran.exists()


def test_an_export_is_code(tiny_run: Path, ran: Path, tmp_path: Path) -> None:
    folder = export_model(tiny_run, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    config["modalities"]["image"]["preparation"]["view"]["name"] = "evilmod.V"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="its programs are code"):
        load_model(folder)
    assert not ran.exists()


LINKS = ("config.yaml", "metrics.jsonl", ".lock", "models", "models/last/model.safetensors", "notes.txt")


@pytest.mark.parametrize("name", LINKS)
def test_links_out_of_a_folder_are_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    for target in (tmp_path / "elsewhere", Path("/dev/zero"), Path("../" * (name.count("/") + 1) + "elsewhere")):
        path = run / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.symlink_to(target)
        with pytest.raises(PolyfedError, match=r"is a link out of the folder|no config\.yaml in it"):
            open_run(run)
        assert not (tmp_path / "elsewhere").exists()


def test_links_within_a_folder_are(run: Path) -> None:
    (run / "models" / "last").rename(run / "models" / "kept")
    (run / "models" / "last").symlink_to("kept")
    assert open_run(run).server_model("last").round == 1
