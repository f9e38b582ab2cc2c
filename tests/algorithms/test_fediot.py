"""FedIoT: a round by hand, the share of clients with several modalities, and learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from by_hand import all_trained, assert_mean, copies
from polyfed.runs.session import Session
from sessions import first_cohort, metrics, prepared
from small_federations import Config, plain_sgd, transformers

ALPHA = 100


@pytest.fixture
def config() -> Config:
    return transformers(name="fediot")


def averaged(**settings: Any) -> Config:
    """Settings of FedIoT's averages."""
    return {"averaging": {"name": "fediot", **settings}}


def counts(session: Session, factor: float = ALPHA) -> dict[str, float]:
    return {info.id: info.samples * (factor if len(info.modalities) > 1 else 1) for info in session.server.clients}


def test_blocks_are_means_with_paired_clients_times_100_and_all_else_stays(config: Config, tmp_path: Path) -> None:
    session = prepared(plain_sgd(config, batch_size=24), tmp_path)  # two steps for each client
    trained, samples = all_trained(session, copies(session.server.weights)), counts(session)
    session.experiment.algorithm.round(session.server, first_cohort(session))
    for modality, type_name in (("image", "image"), ("image", "paired"), ("text", "text"), ("text", "paired")):
        having = {info.id for info in session.server.clients if modality in info.modalities}
        assert len(having) >= 3
        result = session.server.weights[type_name]
        blocks = {name: value for name, value in result.items() if name.startswith(f"encoders.{modality}.blocks.")}
        assert len(blocks) == 12
        assert_mean(blocks, {client: trained[client] for client in having}, samples)
    for type_name, members in session.server.types.items():
        result = session.server.weights[type_name]
        others = {name: value for name, value in result.items() if ".blocks." not in name}
        assert any(name.startswith("heads.") for name in others)
        assert_mean(others, {info.id: trained[info.id] for info in members.clients}, samples)


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_the_recorded_share_is_that_of_the_sample_counts(config: Config, tmp_path: Path, factor: float) -> None:
    config["clients"]["image"]["items"] = 6  # few: the share depends on quantity, not on alpha alone
    config["algorithm"] |= averaged(factor=factor)
    session = prepared(config, tmp_path)
    session.experiment.algorithm.round(session.server, first_cohort(session))
    samples = {
        type_name: session.server.weight(*members.clients) for type_name, members in session.server.types.items()
    }
    expected = {
        f"share.{name}": factor * samples["paired"] / (factor * samples["paired"] + samples[name])
        for name in ("image", "text")
    }
    assert metrics(session) == pytest.approx(expected | {"followed": metrics(session)["followed"]})
    assert expected["share.image"] != pytest.approx(expected["share.text"])


@pytest.mark.parametrize(("absent", "image", "text"), [("paired", 0.0, 0.0), ("image", 1.0, None), ("text", None, 1.0)])
def test_the_share_is_of_those_who_came(
    config: Config, tmp_path: Path, absent: str, image: float | None, text: float | None
) -> None:
    session = prepared(config, tmp_path)
    cohort = first_cohort(session)
    cohort.clients = tuple(client for client in cohort.clients if client.group != absent)
    session.experiment.algorithm.round(session.server, cohort)
    result = metrics(session)
    for name, expected in (("image", image), ("text", text)):
        assert 0.9 < result[f"share.{name}"] < 1 if expected is None else result[f"share.{name}"] == expected


def test_nothing_shared_has_no_share(config: Config, tmp_path: Path) -> None:
    config["algorithm"] |= {"averaging": "by_type"}
    session = prepared(config, tmp_path)
    session.experiment.algorithm.round(session.server, first_cohort(session))
    assert list(metrics(session)) == ["followed"]
