"""Methods of low-rank adapters: a round of each by hand, unequal ranks, refusals; other methods on such encoders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from by_hand import all_trained, assert_mean, copies, model_of
from grids import mostly_slow
from naive import averaged, global_models
from polyfed import open_run, run
from polyfed.aggregation.averagings.low_rank import Factors, Padded, factor_names, fresh
from polyfed.core.errors import ConfigError
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import first_cohort, prepared, woken
from small_federations import Config, adapted, named, plain_sgd

pytest.importorskip("peft", reason="peft is not installed")

Models = dict[str, dict[str, Tensor]]


def session_of(config: Config, folder: Path) -> Session:
    return prepared(plain_sgd(config, batch_size=8), folder)


def unequal(**algorithm: Any) -> Config:
    config = adapted((3, 1), **algorithm)
    config["server"]["model"]["encoders"] = config["clients"]["paired"]["models"][0]["encoders"]
    return config


def counts(session: Session) -> dict[str, int]:
    return {info.id: info.samples for info in session.server.clients}


def played(session: Session) -> Models:
    session.experiment.algorithm.round(session.server, first_cohort(session))
    return session.server.weights


def changes(session: Session, models: Models) -> dict[str, Tensor]:
    """Layer -> the mean of the clients' full changes B A, by those who have it."""
    samples, sums, totals = counts(session), {}, {}
    for client, tensors in models.items():
        for layer, own in factor_names(tensors).items():
            change = samples[client] * Factors(tensors[own.a], tensors[own.b]).change.double()
            sums[layer], totals[layer] = sums.get(layer, 0) + change, totals.get(layer, 0) + samples[client]
    return {layer: value / totals[layer] for layer, value in sums.items()}


def test_fedit_averages_factors_over_all_who_have_the_layer(tmp_path: Path) -> None:
    session = session_of(adapted(name="fedit"), tmp_path)
    trained = all_trained(session, copies(session.server.weights))
    for type_name, new in played(session).items():
        for modality in ("image", "text"):
            factors = {name: value for name, value in new.items() if f".{modality}." in name and "lora" in name}
            having = {client: own for client, own in trained.items() if factors.keys() <= own.keys()}
            assert not factors or len(having) == 3
            assert_mean(factors, having, counts(session))
        assert any("lora" in name for name in new), type_name


@pytest.mark.parametrize("method", ["fedex_lora", "flora"])
def test_the_new_model_is_the_average_of_the_full_ones(method: str, tmp_path: Path) -> None:
    session = session_of(adapted(name=method), tmp_path)
    start = copies(session.server.weights)
    if method == "flora":  # new adapters in every round
        start = {type_name: tensors | fresh(tensors, 0, 1) for type_name, tensors in start.items()}
    mean, new = changes(session, all_trained(session, start)), played(session)["paired"]
    assert len(mean) == 4
    for layer, own in factor_names(new).items():
        full = new[own.offset] + Factors(new[own.a], new[own.b]).change
        torch.testing.assert_close(full.double(), mean[layer], atol=1e-6, rtol=1e-6)
        assert mean[layer].abs().max() > 1e-9
    assert bool(new[next(iter(factor_names(new).values())).b].any()) == (method == "fedex_lora")


def test_an_offset_acts_as_if_it_were_in_the_layer(tmp_path: Path) -> None:
    session = session_of(adapted(name="fedex_lora"), tmp_path)
    weights = copies(session.server.weights)["paired"]
    x, scaling = torch.randn(2, 3, 16, 16), 2.0
    before = model_of(session, "paired-0", weights).eval()
    frozen = {name: value for name, value in before.named_parameters() if "base_layer.weight" in name}
    own = next(own for layer, own in factor_names(weights).items() if ".image." in layer)
    offset = 0.1 * torch.randn_like(weights[own.offset])
    with_offset = model_of(session, "paired-0", weights | {own.offset: offset}).eval()
    added = copies({"": dict(before.state_dict())})[""]
    name = own.offset.replace(".offset", ".weight")
    expected = model_of(session, "paired-0", added).eval()
    layer = expected.get_submodule(name.removesuffix(".weight"))
    layer.weight = torch.nn.Parameter(frozen[name] + scaling * offset)
    torch.testing.assert_close(with_offset.embed("image", x), expected.embed("image", x))
    assert not torch.allclose(with_offset.embed("image", x), before.embed("image", x))


def test_ffa_lora_trains_b_alone_with_one_a_for_all(tmp_path: Path) -> None:
    session = session_of(adapted(name="ffa_lora"), tmp_path)
    start = copies(session.server.weights)
    for tensors in start.values():
        for own in factor_names(tensors).values():
            torch.testing.assert_close(tensors[own.a], fresh(tensors, 0)[own.a])

    def still(name: str, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if "lora_A" in name else gradient

    trained = all_trained(session, start, correct=still)
    new = played(session)["paired"]
    mean = changes(session, trained)
    for layer, own in factor_names(new).items():
        torch.testing.assert_close(new[own.a], start["paired"][own.a])
        product = Factors(new[own.a], new[own.b]).change.double()
        torch.testing.assert_close(product, mean[layer], atol=1e-6, rtol=1e-6)  # exact, as A is one for all


def test_hetlora_keeps_factors_of_which_no_b_has_moved() -> None:
    old = {"own": {"q.lora_A.default.weight": torch.ones(2, 3), "q.lora_B.default.weight": torch.zeros(4, 2)}}
    sent = {name: value + (2.0 if ".lora_A." in name else 0.0) for name, value in old["own"].items()}
    new = averaged(Padded(), global_models(old), [("own", sent, 3.0)])["own"]
    torch.testing.assert_close(new, old["own"])


def test_flexlora_sends_each_rank_its_nearest_factors(tmp_path: Path) -> None:
    session = session_of(unequal(name="flexlora"), tmp_path)
    mean = changes(session, all_trained(session, copies(session.server.weights)))
    ranks = set()
    for new in played(session).values():
        for layer, own in factor_names(new).items():
            u, s, v = torch.linalg.svd(mean[layer])
            rank = len(new[own.a])
            nearest = (u[:, :rank] * s[:rank]) @ v[:rank]
            torch.testing.assert_close(Factors(new[own.a], new[own.b]).change.double(), nearest, atol=1e-6, rtol=1e-5)
            ranks.add(rank)
    assert ranks == {1, 3}


def test_hetlora_starts_alike_and_gives_fading_directions_up(tmp_path: Path) -> None:
    session = session_of(unequal(name="hetlora", pruning=0.001, gamma=0.5), tmp_path)
    large, small = sorted(
        (tensors for type_name, tensors in session.server.weights.items() if "paired" in type_name),
        key=lambda tensors: -len(tensors[next(iter(factor_names(tensors).values())).a]),
    )
    for own in factor_names(small).values():
        torch.testing.assert_close(small[own.a], large[own.a][:1])
    played(session)
    ranks = {int(rank) for rank in woken(session, "paired-0", (2, 0), (1, 0)).state["rank"].values()}
    assert ranks == {3}  # B was zero: no direction can have faded
    algorithm = session.experiment.algorithm
    tensors = {name: torch.ones_like(value) for name, value in large.items()}
    layers = factor_names(tensors)
    tail = algorithm.tail(tensors, dict.fromkeys(layers, 3))
    expected = sum(float(tensors[own.a][1:].norm() * tensors[own.b][:, 1:].norm()) for own in layers.values())
    assert float(tail) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", ["fedit", "flora"])  # the others are as one of these
def test_images_learn_by_names_where_nothing_but_adapters_is_trained(method: str, tmp_path: Path) -> None:
    lora = {"name": "lora", "rank": 2, "offset": method in ("flora", "fedex_lora")}
    session = session_of(named(adapters={"image": lora, "text": lora}, name=method), tmp_path)
    start = copies(session.server.weights)
    for type_name, tensors in played(session).items():
        assert all(".lora_" in name or ".offset" in name for name in tensors)
        assert any(
            not torch.equal(value, start[type_name][name]) for name, value in tensors.items() if ".text." in name
        )
    judged = session.experiment.algorithm.evaluate_clients(session.server, session.cohort(2, Ledger()))
    assert all(math.isfinite(metrics["loss"]) for metrics in judged.values())
    assert len(judged) == 3


@pytest.mark.parametrize("method", ["fedit", "fedex_lora"])  # all others have the rule of the first
def test_unequal_ranks_are_refused_where_they_cannot_be_averaged(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs adapters of one rank.*flexlora, hetlora or flora"):
        prepared(unequal(name=method), tmp_path)


def test_a_method_keeps_the_rule_that_it_is_made_of() -> None:
    with pytest.raises(ConfigError, match="averaging: is by_type, but the method goes with 'stacked'"):
        Experiment.parse(adapted(name="flora", averaging="by_type"))


# ---- other methods, over public data


METHODS: dict[str, Any] = {"creamfl": {}, "fedafd": {}, "change_distillation": {"warmup_rounds": 0}, "fedmd": {}}


@pytest.mark.parametrize("method", mostly_slow(METHODS, "creamfl"))
def test_adapters_learn_and_networks_stay(method: str, tmp_path: Path) -> None:
    config = adapted(name=method, **METHODS[method]) | {"public": {"source": "scenes", "items": 6}}
    run(Experiment.load(config), tmp_path / "run", quiet=True)
    after = open_run(tmp_path / "run").server_model("last").model.exchanged()
    learnt = [value for name, value in after.items() if ".lora_B." in name]  # zero at first
    assert learnt
    assert all(value.abs().max() > 0 for value in learnt)
    assert all(".lora_" in name or ".trunk." not in name for name in after)
