"""What is known of settings from their source is what they check themselves."""

from __future__ import annotations

import pytest

from polyfed.cli.options import EXPERIMENT_KIND
from polyfed.core.errors import ConfigError
from polyfed.core.known_keys import require_known_keys
from polyfed.runs.config_files import overridden, preset_names, read_config
from polyfed.runs.experiment import Experiment

WRONG = (
    "nme=x | twin.pases=1 | run.rnds=3 | run.rounds.x=3 | run.engine.name=rya | algorithm=fedavgg | "
    "algorithm.weigth=2 | run.exchange.phases.fit.min_clinets=2 | run.output.sinks=[{name: wandb, projet: x}] | "
    "algorithm.teacher.wieght=2 | data.sources.scenes.trian=2 | data.sources.scenes=sceens | "
    "server.model.encoders.image.blokcs=3 | server.training.optimizer.lrr=2 | clients.more={cuont: 3, source: scenes}"
)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_known_keys(name: str) -> None:
    require_known_keys(read_config(name), EXPERIMENT_KIND)


@pytest.mark.parametrize("override", WRONG.split(" | "))
def test_a_wrong_key_is_refused_in_the_words_of_the_full_check(override: str) -> None:
    with pytest.raises(ConfigError) as full:
        Experiment.read("scenes-demo", [override])
    with pytest.raises(ConfigError) as quick:
        require_known_keys(overridden(read_config("scenes-demo"), [override])[0], EXPERIMENT_KIND)
    assert str(quick.value) == str(full.value)
