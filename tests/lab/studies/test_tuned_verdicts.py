"""Verdicts on rows that were tuned: what the search may have left to the losing row decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from polyfed.lab.studies.cells import Chosen
from polyfed.lab.studies.claims import Judgement
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study

Load = Callable[..., Study]
SURE = {"as given": [10.0, 11.0, 12.0], "rate x 2": [9.0, 10.0, 11.0], "rate x 0.5": [8.0]}  # without doubt
RATES = {"rate": {"paths": ["clients.*.training.optimizer.lr"]}}


def judgement(
    loaded: Load,
    winner: Mapping[str, Sequence[float]] = SURE,
    loser: Mapping[str, Sequence[float]] = SURE,
    *,
    chosen: float = 1.0,
    winner_chose: float = 1.0,
    ends: Mapping[str, Sequence[str]] | None = None,
    column: Mapping[str, Any] | None = None,
    gain: float = 2.0,
) -> Judgement:
    """``prox > tiny``, prox ahead by ``gain``, more or less."""
    tuning = {"settings": RATES, "column": {"metric": "r1_sum", "kind": "validation"}}
    study = loaded(
        seeds=5, columns={"r1": column or {"metric": "r1_sum"}}, claims={"method": ["prox > tiny on r1"]}, tuning=tuning
    )
    values = {
        ("tiny", (), "r1"): {seed: 10.0 + seed for seed in range(5)},
        ("prox", (), "r1"): {seed: 10.0 + seed + gain + 0.25 * (seed % 2) for seed in range(5)},
    }
    at_end = ends or {}
    found = {
        ("tiny", ()): Chosen({"rate": chosen}, {}, loser, at_end.get("tiny", [])),
        ("prox", ()): Chosen({"rate": winner_chose}, {}, winner, at_end.get("prox", [])),
    }
    return Results(study, values, found).judgements()[0]


def test_a_search_without_doubt_changes_nothing(loaded: Load) -> None:
    plain = judgement(loaded)
    assert (plain.verdict, plain.why) == ("held", "")
    assert plain.sample is not None
    assert plain.p == pytest.approx(plain.sample.p)  # type: ignore[union-attr]


def test_the_loser_is_allowed_what_it_left_to_its_default(loaded: Load) -> None:
    """Its best candidate was 1.9 ahead of the one that it has: a gain of 2.1 is 0.2 beyond that."""
    left = {"as given": [10.0, 11.0, 12.0], "rate x 2": [11.9, 12.9, 13.9]}
    assert judgement(loaded, loser=left).p > judgement(loaded).p
    assert judgement(loaded, loser=left, gain=1.8).verdict == "open"
    assert judgement(loaded, loser=left, gain=1.8, chosen=2.0).verdict == "held"
    assert judgement(loaded, winner=left, gain=1.8).verdict == "held"  # the winner needs none


def test_candidates_that_the_seeds_do_not_order_leave_a_doubt(loaded: Load) -> None:
    noisy = {"as given": [8.0, 13.0, 12.0], "rate x 2": [13.0, 9.0, 8.0], "rate x 0.5": [11.0, 8.0, 11.0]}
    (first, *_, last) = (judgement(loaded, loser=noisy, gain=gain).verdict for gain in (2.0, 3.0, 20.0))
    assert (first, last) == ("open", "held")


def test_another_column_is_allowed_as_many_spreads(loaded: Load) -> None:
    """Spread 1 in tuning and 1.58 over the table's seeds: 0.9 of what was tuned are 1.4 of it."""
    left = {"as given": [10.0, 11.0, 12.0], "rate x 2": [10.9, 11.9, 12.9]}
    other = {"metric": "i2t_r@1"}
    assert judgement(loaded, loser=left, gain=1.2).verdict == "held"
    assert judgement(loaded, loser=left, gain=1.2, column=other).verdict == "open"
    assert judgement(loaded, loser=left, gain=2.0, column=other).verdict == "held"


@pytest.mark.parametrize(("row", "verdict"), [("tiny", "open"), ("prox", "held")])
def test_the_loser_whose_search_ended_at_an_end_is_not_beaten(loaded: Load, row: str, verdict: str) -> None:
    item = judgement(loaded, ends={row: ["rate"]})
    assert item.verdict == verdict
    assert item.why == ("the search of tiny ended at an end of rate" if row == "tiny" else "")


def test_the_loser_that_never_tried_what_the_winner_chose_is_allowed_what_that_gained(loaded: Load) -> None:
    far = {"as given": [10.0, 11.0, 12.0], "rate x 2": [11.0, 12.0, 13.0], "rate x 4": [12.5, 13.5, 14.5]}
    assert judgement(loaded, winner=far, winner_chose=4.0).verdict == "open"
    assert judgement(loaded, winner=far, winner_chose=4.0, gain=3.0).verdict == "held"
    assert judgement(loaded, winner=far, winner_chose=2.0).verdict == "held"  # which was tried
    assert judgement(loaded, winner=far, winner_chose=4.0, loser={**SURE, "rate x 4": [7.0]}).verdict == "held"


def test_nothing_is_decided_on_fewer_than_three_seeds_of_tuning(loaded: Load) -> None:
    one = {"as given": [10.0], "rate x 2": [9.0]}
    item = judgement(loaded, winner=one)
    assert (item.verdict, item.why) == ("open", "tuned on 1 seed")
    assert judgement(loaded, one, one, column={"name": "traffic"}).verdict != "open"  # bytes are not tuned
