"""The method of ``docs/add-a-method.md``: shown in full, and it runs, learns and resumes as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed import Experiment, resume, run
from polyfed.federation.ledger import Ledger
from polyfed.reporting.progress import SilentProgress
from polyfed.runfolder import RunFolder
from polyfed.runner import Session

DOCS = Path(__file__).parent.parent / "docs"
METHOD = {"name": "consensus.Consensus", "digest_epochs": 3}
FILES = ("metrics.jsonl", "ledger.jsonl", "models/last/model.safetensors")


@pytest.fixture
def experiment(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    monkeypatch.setattr("polyfed.runner.draw_all", lambda folder: None)  # takes longer than all the rest
    return tiny | {"algorithm": METHOD}


@pytest.fixture
def session(experiment: dict[str, Any], tmp_path: Path) -> Session:
    prepared = Session(Experiment.load(experiment), RunFolder(tmp_path), SilentProgress())
    prepared.prepare()
    prepared.server.begin(1)
    return prepared


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_the_page_shows_the_whole_file() -> None:
    page = (DOCS / "add-a-method.md").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert (DOCS / "examples" / "consensus.py").read_text(encoding="utf-8") in shown


def test_a_dotted_name_is_all_that_a_method_needs(experiment: dict[str, Any], tmp_path: Path) -> None:
    plain = run(Experiment.load(experiment), tmp_path / "plain")
    assert plain.records.config["algorithm"] == {
        "name": "consensus.Consensus",
        "local_epochs": 1,
        "digest_epochs": 3,
    }
    steps = {line.step for line in plain.records.transfers}
    assert steps == {"fit", "evaluate:assess"}
    assert not plain.records.excluded()

    encoded = experiment | {"run": experiment["run"] | {"serialize": True}}
    assert contents(run(Experiment.load(encoded), tmp_path / "encoded").folder) == contents(plain.folder)


def test_it_resumes_in_the_same_bits(experiment: dict[str, Any], tmp_path: Path) -> None:
    whole = run(Experiment.load(experiment), tmp_path / "run")
    expected = contents(whole.folder)
    for file in (whole.folder / "checkpoints").glob("round-000002.*"):
        file.unlink()
    assert contents(resume(whole.folder).folder) == expected


def test_the_consensus_is_the_mean_of_what_clients_sent(session: Session) -> None:
    server, infos = session.server, session.server.clients
    session.experiment.algorithm.round(server, session._cohort(1, Ledger()))
    woken = [session.site._wake(session.federation.members[info.id], (2, 0)) for info in infos]
    sent = [client.represent(client.public_set) for client in woken]
    for modality in ("image", "text"):
        those = [values[modality] for values in sent if modality in values]
        assert len(those) == sum(modality in info.modalities for info in infos)
        assert torch.allclose(server.state["consensus"][modality], torch.stack(those).mean(0), atol=1e-6)


def test_digesting_brings_a_party_to_the_targets(session: Session) -> None:
    server = session.server
    targets = {name: -values for name, values in server.represent_public().items()}  # at distance 2
    session.experiment.algorithm.model_copy(update={"digest_epochs": 30}).digest(server, targets)
    for name, values in server.represent_public().items():
        assert float((values - targets[name]).norm(dim=1).mean()) < 1.0
