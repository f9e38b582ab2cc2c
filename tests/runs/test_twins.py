"""Twins: what is taken away from an experiment, what stays, and which experiments have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml

import polyfed
from grids import mostly_slow
from polyfed.algorithms.algorithm import Algorithm, Cohort, Server
from polyfed.core.errors import ConfigError
from polyfed.federation.population import Population
from polyfed.runs.config_files import merged
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.server_side import build_federation
from small_federations import METHODS, Config, aligned, federation_for, pixels, pretrained_folder, three_kinds, words

DEADLINE: Config = {"phases": {"fit": {"deadline": 9.0}}}
VARIANTS = ("server-only", "no-private", "local", "pooled", "zero-shot")
PAIRS = [(method, variant) for method in METHODS for variant in VARIANTS]


def twin(config: Config, variant: str, *overrides: str) -> Experiment:
    return Experiment.load(config, [*overrides, f"twin.kind={variant}"])


def federation(experiment: Experiment, folder: Path) -> Population:
    return build_federation(experiment, RunFolder(folder))


def creamfl(**algorithm: object) -> Config:
    return three_kinds(name="creamfl", **algorithm)


# ---- what becomes of an experiment


@pytest.mark.parametrize(("method", "variant"), mostly_slow(PAIRS, *PAIRS[::3]))  # each method, and each twin, by day
def test_every_method_has_its_twins_or_lists_them(method: str, variant: str) -> None:
    config = federation_for(method)
    own = Experiment.load(config)
    if variant not in kinds_of(own):
        with pytest.raises(ConfigError, match=f"twins of '{config['name']}': {', '.join(kinds_of(own))}$"):
            twin(config, variant)
        return
    made = twin(config, variant)
    name = config["name"]
    assert (made.name, made.twin.of) == (f"{name}-{variant}", name)
    # what the run folder has gives the same run, and no twin of the twin
    assert Experiment.load(yaml.safe_load(made.to_yaml())) == made


def kinds_of(experiment: Experiment) -> list[str]:
    """The twins of an experiment of ``federation_for``, some of whose paired clients always hold private pairs."""
    has_public = experiment.public is not None
    has_server = has_public and experiment.server is not None
    there = {"server-only": has_server, "no-private": has_public, "local": experiment.algorithm.asks_clients}
    there |= {"pooled": has_server, "zero-shot": experiment.name == "named"}
    return [variant for variant, is_there in there.items() if is_there]


@pytest.mark.parametrize("variant", ["server-only", "pooled"])
def test_a_server_alone_asks_no_client_and_keeps_all_else(variant: str) -> None:
    config = creamfl(task={"epochs": 2}, distiller={"epochs": 3})
    config["run"] |= {"sampling": {"cohort": 2}, "exchange": DEADLINE, "engine": "ray", "eval_every": 2}
    own, made = Experiment.load(config), twin(config, variant)
    assert (made.clients, made.algorithm.component_name(), made.algorithm.server_epochs) == ({}, "server_only", 5)
    assert (made.server, made.data, made.run.rounds, made.run.seed) == (own.server, own.data, 2, own.run.seed)
    assert (made.run.sampling.cohort, made.run.exchange.phases, made.run.evaluate_clients) == (None, {}, False)
    assert (made.run.engine.component_name(), made.run.eval_every) == ("local", 2)
    assert (made.public == own.public) == (variant == "server-only")


NOISE: Config = {"reply": {"weights": 1.0, "noise_multiplier": 1.0}}


@pytest.mark.parametrize("variant", ["server-only", "pooled", "local", "no-private"])
@pytest.mark.parametrize(
    "change",
    [{"run": {"pace": {"name": "buffered", "replies": 3, "concurrency": 3}}}, {"privacy": NOISE}],
    ids=["pace", "privacy"],
)
def test_twins_are_made_whatever_the_pace_and_the_noise(variant: str, change: Config) -> None:
    config = three_kinds() | {"algorithm": {"name": "fedavg"}}
    config["run"] |= {"evaluate_clients": False}
    made = twin(merged(config, change), variant)
    assert (made.privacy is None) == (variant != "no-private" or "privacy" not in change)
    if variant in ("server-only", "pooled"):
        assert made.run.pace.component_name() == "sync"
    elif "run" in change:
        assert made.run.pace.component_name() == "buffered"


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({"name": "creamfl"}, 2),
        ({"name": "creamfl", "task": {"order": "joint"}, "distiller": {"epochs": 4}}, 4),
        ({"name": "creamfl", "task": None, "distiller": None}, 1),
        ({"name": "fedgems", "distiller": {"epochs": 3}}, 3),
        ({"name": "fedavg"}, 1),
        ({"name": "server_only", "server_epochs": 6}, 6),
    ],
)
def test_a_server_alone_has_the_passes_of_the_methods_server(algorithm: Config, passes: int) -> None:
    config = three_kinds()
    config["algorithm"] = algorithm
    assert twin(config, "server-only").algorithm.server_epochs == passes


@pytest.mark.parametrize(
    ("config", "training"),
    [
        (creamfl(local_epochs=3), (3, None)),
        (aligned(local_steps=4, teacher={"steps": 6}), (5, 10)),
        (aligned(local_steps=None, local_epochs=2), (2, None)),
    ],
)
def test_clients_alone_train_as_long_as_with_the_method(config: Config, training: tuple[int, int | None]) -> None:
    config["run"] |= {"evaluate_clients": False, "exchange": DEADLINE}
    own, made = Experiment.read(config), twin(config, "local")
    assert (made.algorithm.component_name(), made.server) == ("local", None)
    assert (made.algorithm.local_epochs, made.algorithm.local_steps) == training
    assert (made.clients, made.public) == (own.clients, own.public)
    assert made.run == own.run.model_copy(update={"evaluate_clients": True})
    config["run"]["evaluate_clients"] = 1
    assert twin(config, "local").run.evaluate_clients == 1


def test_clients_alone_rest_while_the_methods_clients_wait(tmp_path: Path) -> None:
    config = three_kinds()
    config["algorithm"] = {"name": "change_distillation", "warmup_rounds": 1}
    config["run"] |= {"rounds": 2}
    made = twin(config, "local")
    assert made.algorithm.idle_rounds == 1
    run = polyfed.run(made, tmp_path / "run", quiet=True)
    assert {transfer.round for transfer in run.records.transfers if "fit" in transfer.step} == {2}


# ---- who holds what


def test_without_private_data_clients_hold_their_share_of_the_public_samples(tmp_path: Path) -> None:
    config = creamfl()
    config["clients"]["paired"] |= {"partition": {"name": "quantity", "min_size": 2}, "also": "public"}
    config["run"] |= {"sampling": {"cohort": 3}, "exchange": {"min_clients": 3, "phases": {"fit": {"min_clients": 4}}}}
    made = twin(config, "no-private")
    asked, own = made.run.exchange, Experiment.read(config)
    assert (made.run.sampling.cohort, asked.min_clients, asked.phases["fit"].min_clients) == (2, 2, 2)
    assert (made.algorithm, made.server, made.public) == (own.algorithm, own.server, own.public)
    there = federation(made, tmp_path)
    there.require_sound()
    members = there.members.values()
    assert [member.group for member in members] == ["paired", "paired"]
    dealt = torch.cat([member.items for member in members])
    assert torch.equal(dealt.sort().values, there.public.items)  # each once, and nothing else
    public = there.public_samples({})
    for member in members:
        samples = there.train(member)
        assert set(samples.items.tolist()) == set(member.items.tolist())
        # as many captions of an item as are public, not as many as its source has
        assert len(samples) == int(torch.isin(public.items, member.items).sum()) == 2 * len(member.items)
        held = there.holding(member)
        assert (held["items"], held["samples"]) == (len(member.items), len(samples))


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, 16),  # all of the split
        ({"items": 5}, 8 + 5),
        ({"items": 5, "also": {"source": "scenes", "split": "validation"}}, 8 + 5),
        ({"source": "scenes", "split": "validation", "also": {"source": "scenes", "items": 3}}, 8 + 3),
    ],
    ids=["everything", "so many", "another split does not count", "held in addition"],
)
def test_pooled_items_are_public_ones_and_as_many_as_clients_hold(tmp_path: Path, changes: Config, held: int) -> None:
    config = creamfl()
    config["clients"]["paired"] |= changes
    there = federation(twin(config, "pooled"), tmp_path)
    there.require_sound()
    own = federation(Experiment.load(config), tmp_path)
    assert len(there.public.items) == held
    assert torch.isin(own.public.items, there.public.items).all()  # what was public is among them
    assert len(there.public_samples({})) == 5 * held  # with every caption


# ---- refusals


class Unsaid(Algorithm):
    """A method that does not define how long it trains."""

    needs_public: ClassVar[bool] = True

    def round(self, server: Server, cohort: Cohort) -> None:
        """Nothing."""


def with_unsaid(config: Config) -> None:
    config["algorithm"] = f"{__name__}.Unsaid"


UNSAID = "'.*Unsaid' does not define how long its"


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("server-only", lambda c: c.pop("public"), "it has no public set; twins of 'three-kinds': local$"),
        ("pooled", lambda c: c.pop("public"), "it has no public set; twins of 'three-kinds': local$"),
        ("server-only", lambda c: c.pop("server"), "no server model; twins of 'three-kinds': no-private, local$"),
        ("server-only", lambda c: c["server"].update(validation_split=None), "validation_split is null: no model is"),
        ("no-private", lambda c: c["clients"].pop("paired"), "no group has the source 'scenes' of P; .*server-only, l"),
        ("pooled", lambda c: c["clients"].pop("paired"), "no client holds private items of 'scenes'; "),
        ("pooled", lambda c: c["clients"]["paired"].update(items="public"), "holds private items of 'scenes'"),
        ("pooled", lambda c: c["public"].pop("items"), "public.items is null: all that there is is public"),
        ("pooled", lambda c: c.update(algorithm="server_only") or c.update(clients={}), "'three-kinds': server-only$"),
        ("local", lambda c: c.update(algorithm="server_only"), "'server_only' asks no clients; .*server-only, no-priv"),
        ("local", with_unsaid, rf"{UNSAID} clients train \(local_training\); .*: no-private$"),
        ("server-only", with_unsaid, rf"{UNSAID} server trains \(server_passes\)"),
        ("pooled", with_unsaid, rf"{UNSAID} server trains \(server_passes\)"),
        ("global", lambda c: None, "twin.kind: .*'server-only', 'no-private', 'local', 'pooled' or 'zero-shot'"),
        ("local", lambda c: c.update(twin={"kind": "local", "of": "x"}), "a twin of 'x' already; give that experiment"),
    ],
)
def test_experiments_without_a_twin_list_others(variant: str, change: Callable[[Config], object], message: str) -> None:
    config = creamfl()
    change(config)
    with pytest.raises(ConfigError, match=message):
        twin(config, variant)


# ---- pretrained encoders as they come


def of_towers(tiny: Config) -> Config:
    """Paired clients that adapt a network of two towers, which meet in a space of its own."""
    common = {"name": "hf", "weights": "clip", "projection": "own", "adapter": {"name": "lora", "rank": 2}}
    towers = {"image": {"tower": "vision", "view": pixels()}, "text": {"tower": "text", "view": words(16, 200)}}
    model = {"dim": 8, "encoders": {name: common | own for name, own in towers.items()}}
    tiny["clients"] = {"paired": tiny["clients"]["paired"] | {"model": model}}
    tiny["server"]["model"] = model
    tiny["data"]["weights_dir"] = str(pretrained_folder())
    return tiny


@pytest.mark.slow
def test_zero_shot_is_what_the_run_began_with(tiny: Config, tmp_path: Path) -> None:
    config = of_towers(tiny)
    config["server"]["training"] |= {"schedule": {"warmup": 2}}  # which the twin's one round has no room for
    own = polyfed.run(Experiment.load(config), tmp_path / "own", quiet=True)
    made = twin(config, "zero-shot")
    assert (made.clients, made.server.model.encoders["image"].adapter) == ({}, None)
    alone = polyfed.run(made, tmp_path / "alone", quiet=True)
    before, after = (own.records.series("server", "r1_sum")[place] for place in (0, own.records.rounds))
    assert alone.metrics()["r1_sum"] == pytest.approx(before)
    assert after != before
    assert not any(name.startswith("encoders.") for name in alone.server_model().model.exchanged())
