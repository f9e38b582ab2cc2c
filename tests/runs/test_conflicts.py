"""What does not go together: a choice for each row of the table, told by that row alone, and refused before a run."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.settings import parse_settings
from polyfed.federation.attack import Attack
from polyfed.federation.paces import Pace
from polyfed.privacy.settings import AggregationSettings
from polyfed.runs.conflicts import CONFLICTS, Choice, conflicts
from small_federations import METHODS

LATE, MASKED, ROBUST = {"pace": "buffered"}, {"secure": "pairwise_masks"}, {"robust": "median"}
SEQUENTIAL = {"name": "fedavg", "averaging": {"name": "by_type", "mean": "sequential"}}
COUNTED: dict[str, Any] = {"name": "creamfl", "teacher": {"weights": "count"}}
ALIGNED = {"name": "creamfl", "teacher": {"weights": "count", "alignment": {"kind": "procrustes"}}}


def choice(algorithm: Any = "fedavg", pace: str = "sync", attackers: str | None = None, **aggregation: Any) -> Choice:
    named = algorithm if isinstance(algorithm, dict) else {"name": algorithm}
    return Choice(
        parse_settings(Algorithm, named),
        AggregationSettings(**{"clip": None} | aggregation),
        parse_settings(Pace, {"name": pace}),
        () if attackers is None else (parse_settings(Attack, {"name": attackers}),),
    )


ROWS: dict[str, dict[str, Any]] = {
    "late_replies unasked_clients": {"algorithm": "server_only"} | LATE,
    "late_replies one_model_a_round": {"algorithm": "fedaid"} | LATE,
    "late_replies averaged_changes": {"algorithm": {"name": "fedavg", "averaging": "residual"}} | LATE,
    "late_replies public_samples": {"algorithm": {"name": "creamfl", "public": {"samples": 10}}} | LATE,
    "late_replies sequential_mean": {"algorithm": SEQUENTIAL} | LATE,
    "late_replies masked_sums": {"pace": "async"} | MASKED,
    "late_replies robust_rule": LATE | ROBUST,
    "robust_rule nothing_combined": {"algorithm": "local"} | ROBUST,
    "robust_rule alignment": {"algorithm": ALIGNED} | ROBUST,
    "falsified_replies nothing_combined": {"algorithm": "local", "attackers": "noise"},
    "masked_sums weighed_by_content": {"algorithm": "creamfl"} | MASKED,
    "masked_sums alignment": {"algorithm": ALIGNED} | MASKED,
    "masked_sums sequential_mean": {"algorithm": SEQUENTIAL} | MASKED,
    "masked_sums unsummed_method": {"algorithm": "scaffold"} | MASKED,
    "masked_sums single_values": {"algorithm": "fedema"} | MASKED,
    "masked_sums robust_rule": MASKED | ROBUST,
    "masked_sums clipping": MASKED | {"clip": {}},
    "masked_sums conspiracy": {"attackers": "copied"} | MASKED,
}


def test_each_row_has_a_choice() -> None:
    assert [f"{one.__name__} {other.__name__}" for one, other, _ in CONFLICTS] == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_tells_both_features_and_why(row: str) -> None:
    made = choice(**ROWS[row])
    one, other, reason = next(pair for pair in CONFLICTS if f"{pair[0].__name__} {pair[1].__name__}" == row)
    assert f"{one(made)} does not go with {other(made)}: {reason}" == next(iter(conflicts(made)))


@pytest.mark.parametrize("sums", [{}, MASKED, ROBUST, LATE, {"clip": {}}])
def test_what_averages_goes_with_each(sums: dict[str, Any]) -> None:
    assert list(conflicts(choice(**sums))) == []
    assert list(conflicts(choice(COUNTED, **sums))) == []


@pytest.mark.parametrize("method", ["fedex_lora", "flora", "flexlora", "hetlora"])
def test_changes_of_factors_are_averaged_of_one_model(method: str) -> None:
    assert f"'buffered' does not go with algorithm '{method}'" in next(iter(conflicts(choice(method, "buffered"))))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_with_itself(method: str) -> None:
    assert list(conflicts(choice(method))) == []
