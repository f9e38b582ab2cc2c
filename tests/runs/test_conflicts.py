"""Conflicts: one choice for each row of the table, which that row alone refuses, before a run."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed.algorithms.algorithm import Algorithm, Cohort, Server, each
from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.settings import parse_settings
from polyfed.privacy.settings import AggregationSettings, PrivacySettings
from polyfed.runs.conflicts import CONFLICTS, Choice, Feature, conflicts
from polyfed.runs.settings import InitialModels, RunSettings
from small_federations import METHODS, Config


class OwnRound(FedAvg):
    """A round of its own, without a declaration of sums."""

    def round(self, server: Server, cohort: Cohort) -> None:
        """FedAvg of replies that were looked at one by one."""
        means = server.new_means(self.averaging, cohort)
        for reply in cohort.ask(self.fit, weights=each(server.weights_for)):
            if reply.num_examples:
                means[reply.type].add(reply.weights, reply.num_examples)
        server.update_weights(server.averaged(self.averaging, means))


LATE, MASKED, ROBUST = {"run": {"pace": "buffered"}}, {"secure": "pairwise_masks"}, {"robust": "median"}
DEPLOYED = {"engine": {"name": "flower", "superlink": "localhost:9093"}}
SEQUENTIAL = {"name": "fedavg", "averaging": {"name": "by_type", "mean": "sequential"}}
COUNTED: dict[str, Any] = {"name": "creamfl", "teacher": {"weights": "count"}}
ALIGNED = {"name": "creamfl", "teacher": {"weights": "count", "alignment": {"kind": "procrustes"}}}


def choice(algorithm: Any = "fedavg", run: Any = None, privacy: Any = None, initial: Any = None, **sums: Any) -> Choice:
    method = parse_settings(Algorithm, algorithm if isinstance(algorithm, dict) else {"name": algorithm})
    private = None if privacy is None else parse_settings(PrivacySettings, privacy)
    settings = AggregationSettings(**sums), parse_settings(RunSettings, run or {})
    return Choice(method, *settings, private, initial and InitialModels(run=initial))


ROWS: tuple[Config, ...] = (
    {"run": DEPLOYED | {"pace": {"name": "sync", "clients": "drawn"}}},
    {"run": DEPLOYED | {"attackers": "noise"}},
    {"run": DEPLOYED, "initial": "other"},
    {"privacy": {"reply": {"weights": 1.0, "noise_multiplier": 1.0}}, "initial": "other"},
    {"algorithm": "server_only"} | LATE,
    {"algorithm": "fedaid"} | LATE,
    {"algorithm": {"name": "fedavg", "averaging": "residual"}} | LATE,
    {"algorithm": {"name": "creamfl", "public": {"samples": 10}}} | LATE,
    {"algorithm": SEQUENTIAL} | LATE,
    LATE | MASKED,
    LATE | ROBUST,
    {"algorithm": "local"} | ROBUST,
    {"algorithm": ALIGNED} | ROBUST,
    {"algorithm": "local", "run": {"attackers": "noise"}},
    {"algorithm": "creamfl"} | MASKED,
    {"algorithm": ALIGNED} | MASKED,
    {"algorithm": SEQUENTIAL} | MASKED,
    {"algorithm": "flexlora"} | MASKED,
    {"algorithm": COUNTED | {"distiller": {"loss": "similarity"}}} | MASKED,
    {"algorithm": "scaffold"} | MASKED,
    {"algorithm": "fedema"} | MASKED,
    MASKED | ROBUST,
    MASKED | {"clip": {}},
    {"algorithm": "fedprox", "privacy": {"metrics": "clear", "samples": {"noise_multiplier": 1.0}}},
    {"privacy": {"reply": {"weights": 1.0, "noise_multiplier": 1.0}}},
)
"""For each row of ``CONFLICTS`` a choice that it reports before all others."""


@pytest.mark.parametrize(("row", "settings"), [*zip(CONFLICTS, ROWS, strict=True)])
def test_a_row_names_both_features_and_the_reason(row: tuple[Feature, Feature, str], settings: Config) -> None:
    made = choice(**settings)
    one, other, reason = row
    assert f"{one(made)} does not go with {other(made)}: {reason}" == next(iter(conflicts(made)))


@pytest.mark.parametrize("sums", [{}, MASKED, ROBUST, LATE, {"clip": {}}])
def test_what_averages_goes_with_each(sums: dict[str, Any]) -> None:
    assert list(conflicts(choice(**sums))) == []
    assert list(conflicts(choice(COUNTED, **sums))) == []


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_with_itself_and_changes_of_factors_are_averaged_of_one_model(method: str) -> None:
    assert list(conflicts(choice(method))) == []
    if method in ("fedex_lora", "flora", "flexlora", "hetlora"):
        assert f"'buffered' does not go with algorithm '{method}'" in next(iter(conflicts(choice(method, **LATE))))


def test_a_round_of_ones_own_inherits_no_promise_that_sums_are_enough() -> None:
    masked = AggregationSettings(**MASKED)
    assert not list(conflicts(Choice(FedAvg(), masked)))
    assert "needs each client's reply" in next(iter(conflicts(Choice(OwnRound(), masked))))
