"""Settings: components by name, moved keys, and mistyped ones."""

from __future__ import annotations

from typing import ClassVar

import pytest
from pydantic import SerializeAsAny, ValidationError

from polyfed.algorithms.algorithm import Algorithm
from polyfed.algorithms.fedavg import FedAvg
from polyfed.cli.options import EXPERIMENT_KIND
from polyfed.core.errors import ConfigError
from polyfed.core.known_keys import require_known_keys
from polyfed.core.settings import Settings
from polyfed.partitions.partition import Dirichlet, Partition
from polyfed.runs.config_files import overridden, preset_names, read_config
from polyfed.runs.experiment import Experiment
from small_federations import Config


class Holder(Settings):
    partition: SerializeAsAny[Partition]
    algorithm: SerializeAsAny[Algorithm] = FedAvg()


class Foreign(FedAvg):
    home_town: ClassVar[str] = "elsewhere"
    extra: int = 3


def test_a_component_is_chosen_by_name() -> None:
    held = Holder.model_validate({"partition": {"name": "dirichlet", "alpha": 0.1}, "algorithm": "fedavg"})
    assert held.partition == Dirichlet(alpha=0.1)
    assert isinstance(held.algorithm, FedAvg)


def test_settings_survive_a_round_trip() -> None:
    held = Holder(partition=Dirichlet(alpha=0.25), algorithm=FedAvg(local_epochs=2))
    dumped = held.model_dump(mode="json")
    assert dumped["partition"]["name"] == "dirichlet"
    assert Holder.model_validate(dumped) == held


def test_code_outside_polyfed_needs_no_registration() -> None:
    name = f"{Foreign.__module__}.Foreign"
    held = Holder.model_validate({"partition": "iid", "algorithm": {"name": name, "extra": 5}})
    assert isinstance(held.algorithm, Foreign)
    assert held.algorithm.extra == 5
    assert held.model_dump(mode="json")["algorithm"]["name"] == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"partition": "dirichlt"}, "did you mean 'dirichlet'"),
        ({"partition": {"name": "dirichlet", "alfa": 1}}, "unknown key 'alfa'; did you mean 'alpha'"),
        ({"partition": {"name": "dirichlet", "alpha": -1}}, "greater than 0"),
        ({"partition": {"alpha": 1}}, "needs a name"),
        ({"partition": "os.path.join"}, "not a subclass"),
        ({"partition": "no.such.Thing"}, "cannot import"),
        ({"partition": "this.1"}, "'this.1' is not an import path; give it as package.module.Class"),
        ({"partition": "iid", "algoritm": 1}, "did you mean 'algorithm'"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_valid(content: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Holder.model_validate(content)


def test_what_moved_is_read_under_its_old_name_with_one_warning(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    tiny["run"] |= {"sinks": [], "output": {"plots": True}, "deadline": 5.0}
    experiment = Experiment.load(tiny, ["run.plots=false", "run.phases.fit.min_clients=2", "run.min_clients=0"])
    assert experiment.run.output.plots is False
    assert experiment.run.exchange.deadline == 5
    assert experiment.run.exchange.reply_policy("fit").min_clients == 2
    assert caplog.messages.count("run.deadline is run.exchange.deadline now; the old name is still read") <= 1


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
