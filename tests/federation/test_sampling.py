"""Sampling: who is drawn for a round."""

from __future__ import annotations

import pytest

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.federation.client import ClientInfo
from polyfed.federation.sampling import SamplingSettings


def info(name: str, group: str = "g") -> ClientInfo:
    return ClientInfo(name, group, ("image",), "classification", 10, 5, "m")


CLIENTS = tuple(info(f"{group}{k}", group) for group, count in (("i", 10), ("t", 10), ("p", 15)) for k in range(count))


def test_uniform_sampling_is_without_replacement_in_client_order_and_seeded() -> None:
    sampling = SamplingSettings(cohort=10)
    drawn = sampling.draw(CLIENTS, generator(1))
    assert len({client.id for client in drawn}) == 10
    assert list(drawn) == [client for client in CLIENTS if client in drawn]
    assert drawn == sampling.draw(CLIENTS, generator(1))
    assert drawn != sampling.draw(CLIENTS, generator(2))
    assert SamplingSettings().draw(CLIENTS, generator(1)) == CLIENTS


def test_stratified_sampling_takes_a_share_of_every_group() -> None:
    federation = tuple(info(f"{g}{k}", g) for g, count in (("v", 12), ("l", 12), ("vl", 8)) for k in range(count))
    drawn = SamplingSettings(kind="stratified", cohort=0.25).draw(federation, generator(3))
    assert [sum(client.group == g for client in drawn) for g in ("v", "l", "vl")] == [3, 3, 2]
    few = SamplingSettings(kind="stratified", cohort=0.01).draw(federation, generator(3))
    assert [sum(client.group == g for client in few) for g in ("v", "l", "vl")] == [1, 1, 1]


def test_a_cohort_larger_than_the_federation_is_refused() -> None:
    with pytest.raises(ConfigError, match="cohort is 36, but there are 35"):
        SamplingSettings(cohort=36).draw(CLIENTS, generator(1))
    with pytest.raises(ConfigError, match="set 3 to 35"):
        SamplingSettings(kind="stratified", cohort=2).draw(CLIENTS, generator(1))


@pytest.mark.parametrize(("cohort", "expected"), [(10, [3, 3, 4]), (3, [1, 1, 1]), (35, [10, 10, 15]), (4, [1, 1, 2])])
def test_a_stratified_number_is_met_in_proportion(cohort: int, expected: list[int]) -> None:
    drawn = SamplingSettings(kind="stratified", cohort=cohort).draw(CLIENTS, generator(5))
    assert [sum(client.group == g for client in drawn) for g in ("i", "t", "p")] == expected
