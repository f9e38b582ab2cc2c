"""What is gone is told in one line, wherever a configuration names it."""

from __future__ import annotations

import re

import pytest

import paper_studies
from polyfed.algorithms.algorithm import Algorithm
from polyfed.cli.main import main
from polyfed.core.errors import ConfigError
from polyfed.core.removed import REMOVED, STUDIES, removed, removed_study
from polyfed.core.settings import Settings
from polyfed.data.source import Source
from polyfed.federation.paces import Staleness
from polyfed.lab.studies.columns.models import AnalysisColumn
from polyfed.lab.studies.study_files import study_content
from polyfed.models.adapters.adapter import Adapter
from polyfed.models.encoder import Encoder
from polyfed.optim.servers import ServerOptimizer
from polyfed.partitions.partition import Partition
from polyfed.runs.experiment import Experiment
from polyfed.tasks.imputations import Imputation
from small_federations import Config

LINE = r"was removed in 0\.4; version 0\.3 has it"


def test_a_name_that_never_was_is_not_removed() -> None:
    assert removed("algorithm", "creamfl") == ""


FAMILIES: tuple[type[Settings], ...] = (
    *(Adapter, Algorithm, Encoder, Imputation, Partition, ServerOptimizer, Source, Staleness),
)


@pytest.mark.parametrize(
    ("family", "name"),
    [(kind, name) for kind in FAMILIES for name in sorted(REMOVED.get(kind.__name__.lower(), ()))],
)
def test_a_component_that_is_gone_says_so(family: type[Settings], name: str) -> None:
    with pytest.raises(ValueError, match=LINE):
        family.named(name)


@pytest.mark.parametrize("name", sorted(REMOVED.get("command", ())))
def test_a_command_that_is_gone_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "runs/mine", "--option"]) == 2
    assert re.search(LINE, capsys.readouterr().err)


@pytest.mark.parametrize("name", sorted(REMOVED.get("study", ())))
def test_a_study_that_is_gone_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=LINE):
        study_content(name)


def test_a_study_that_had_a_name_is_a_file() -> None:
    names = {name for names in STUDIES.values() for name in names} | {"papers/creamfl-t1", "papers/fedcola-shapley"}
    found = {str(re.search(r"papers/(\w+/[\w-]+)\.yaml", removed_study(name))[1]) for name in names}  # type: ignore[index]
    assert found - paper_studies.STUDIES.keys() == set()
    assert len(found) == len(names)
    with pytest.raises(ConfigError, match=r"no study file 'demo'; since 0\.4 it is papers/polyfed/demo\.yaml in"):
        study_content("demo")
    assert removed_study("mine") == ""


@pytest.mark.parametrize("name", sorted(REMOVED["analysis"]))
def test_an_analysis_that_is_gone_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=LINE):
        AnalysisColumn(analysis=name, figure="total.up").require(None)  # type: ignore[arg-type]


def test_what_moved_is_read_under_its_old_name_with_one_warning(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    tiny["run"] |= {"sinks": [], "output": {"plots": True}, "deadline": 5.0}
    experiment = Experiment.load(tiny, ["run.plots=false", "run.phases.fit.min_clients=2", "run.min_clients=0"])
    assert experiment.run.output.plots is False
    assert experiment.run.exchange.deadline == 5
    assert experiment.run.exchange.reply_policy("fit").min_clients == 2
    assert caplog.messages.count("run.deadline is run.exchange.deadline now; the old name is still read") <= 1
