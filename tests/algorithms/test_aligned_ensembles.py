"""Clients with spaces of their own: aligned before they are averaged, or compared with themselves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from by_hand import unit
from polyfed.aggregation.ensemble import Alignment, Ensembled, Rows
from polyfed.aggregation.weighting import Mean
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.algorithms.shared.teacher import Ensembles, Teacher
from polyfed.core.randomness import isolated
from polyfed.wire.payload import Representations
from sessions import distil, first_cohort, metrics, prepared
from small_federations import three_kinds, training

Kind = Literal["procrustes", "ridge"]
KINDS: tuple[Kind | None, ...] = (None, "procrustes", "ridge")


def turned(values: Tensor, seed: int) -> Tensor:
    return values @ torch.linalg.qr(unit(values.shape[1], values.shape[1], seed=seed))[0]


def ensembles(folder: Path, known: Tensor, form: Kind | None) -> Ensembles:
    server = prepared(three_kinds(name="creamfl"), folder).server
    teacher = Teacher(weights=Mean(), alignment=Alignment(kind=form) if form else None)
    return Ensembles(teacher, PublicExchange(), server, Representations({"image": known}, order=""))


def test_turned_copies_of_the_server_average_to_it_once_they_are_aligned(tmp_path: Path) -> None:
    known = unit(200, 8, seed=0)
    lengths = dict[Kind | None, float]()
    for form in KINDS:
        folded = ensembles(tmp_path / f"{form}", known, form)
        for seed in range(1, 5):
            folded.add_weighed("image", f"{seed}", folded.clip_and_align({"image": turned(known, seed)})["image"], 0.0)
        mean = folded.targets()["image"].values
        lengths[form] = float(mean.norm(dim=1).mean())
        assert torch.allclose(mean, known, atol=0.03) == (form is not None)
    assert lengths[None] < 0.7 < lengths["procrustes"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("form", ["procrustes", "ridge"])
def test_one_huge_row_moves_the_others_little(tmp_path: Path, form: Kind) -> None:
    known = unit(200, 8, seed=0)
    folded, honest = ensembles(tmp_path, known, form), turned(known, 1)
    attack = honest.clone()
    attack[0] = -1e6 * turned(known, 2)[0]
    expected, actual = (folded.clip_and_align({"image": rows})["image"] for rows in (honest, attack))
    assert float((expected - actual)[1:].norm(dim=1).max()) < 0.05
    assert float(actual.norm(dim=1).max()) < 1.001


def test_similarity_brings_what_is_alike_nearer_in_no_common_space(tmp_path: Path) -> None:
    config = three_kinds(name="creamfl", distiller={"loss": "similarity", "epochs": 80}, task=None)
    config["server"]["training"] = training("adamp", 0.01, 16)
    session = prepared(config, tmp_path)
    values = unit(len(session.server.public_set), 8, seed=1)
    clients = {f"{seed}": Rows(turned(values, seed), torch.zeros(len(values))) for seed in (2, 3)}
    valid = torch.ones(len(values), dtype=torch.bool)
    mean = torch.stack([rows.values for rows in clients.values()]).mean(0)
    with isolated(0):  # as rounds do: the server's dropout draws from torch's global generator
        distil(session, dict.fromkeys(("image", "text"), Ensembled(mean, valid, clients)))
    recorded = metrics(session)
    for modality in ("image", "text"):
        assert recorded[f"kd_similarity_after.{modality}"] < 0.8 * recorded[f"kd_similarity_before.{modality}"]
        assert f"kd_distance_after.{modality}" in recorded


@pytest.mark.parametrize("loss", ["l2", "similarity"])
def test_a_server_that_stands_still_is_as_far_from_its_targets_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Jointly with the task the passes are over all of P, and the targets of ten samples are spread over it."""
    session = prepared(
        three_kinds(name="creamfl", distiller={"loss": loss}, task={"order": "joint"}, public={"samples": 10}), tmp_path
    )
    monkeypatch.setattr(PublicExchange, "passes", lambda *_: iter(()))
    session.experiment.algorithm.round(session.server, first_cohort(session))
    recorded = metrics(session)
    before = {key: value for key, value in recorded.items() if key.startswith("kd_") and "_before" in key}
    assert len(before) == (4 if loss == "similarity" else 2)
    for key, value in before.items():
        assert recorded[key.replace("before", "after")] == pytest.approx(value, abs=1e-5)
