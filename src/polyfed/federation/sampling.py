"""Sampling of a round's cohort."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field, field_validator, model_validator

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.federation.client import ClientInfo


class SamplingSettings(Settings):
    """Sampling of the clients of a round."""

    kind: Literal["uniform", "stratified"] = Field(
        default="uniform", description="from all clients together, or a share of every group (at least one)"
    )
    cohort: int | float | dict[str, int | float] | None = Field(
        default=None,
        description="clients per round: a number (integer), a share of each group, at least one (fraction), either by "
        "group (a mapping that names every group; stratified), None: all",
    )

    @field_validator("cohort")
    @classmethod
    def _positive(cls, value: float | dict[str, int | float] | None) -> float | dict[str, int | float] | None:
        for share in value.values() if isinstance(value, dict) else (value,):
            if share is not None and not share > 0:
                raise ValueError(f"a cohort is a number of clients or a share of them, greater than 0, not {share}")
        return value

    @model_validator(mode="after")
    def _strata(self) -> SamplingSettings:
        if isinstance(self.cohort, dict) and self.kind != "stratified":
            raise ValueError("cohort is given by group, which needs kind: stratified")
        return self

    def draw(self, clients: tuple[ClientInfo, ...], stream: torch.Generator) -> tuple[ClientInfo, ...]:
        """A cohort, without replacement, in client order.

        Raises:
            ConfigError: the cohort is larger than the federation.
        """
        strata: dict[str, list[ClientInfo]] = {}
        for client in clients:
            strata.setdefault(client.group if self.kind == "stratified" else "", []).append(client)
        chosen = set()
        sizes = self._sizes({name: len(members) for name, members in strata.items()})
        for members, size in zip(strata.values(), sizes, strict=True):
            # all are shuffled whatever the size, so that the next group's draw does not depend on it
            order = torch.randperm(len(members), generator=stream).tolist()
            chosen |= {members[k].id for k in order[:size]}
        return tuple(client for client in clients if client.id in chosen)

    def _sizes(self, clients: Mapping[str, int]) -> list[int]:
        """Clients to draw from each group, given the number of its ``clients``."""
        groups, everybody = list(clients.values()), sum(clients.values())
        if self.cohort is None or not everybody:
            return groups
        if isinstance(self.cohort, dict):
            return [_of_group(self.cohort, name, clients) for name in clients]
        if isinstance(self.cohort, float):
            return [_share_of(self.cohort, size) for size in groups]
        if not len(groups) <= self.cohort <= everybody:
            valid = f"{len(groups)} to {everybody}" if len(groups) > 1 else f"at most {everybody}"
            there = f"there are {everybody} clients in {len(groups)} group(s) to draw from"
            raise ConfigError(f"run.sampling.cohort is {self.cohort}, but {there}; set {valid}")
        return _apportioned(self.cohort, groups)


def _share_of(share: float, size: int) -> int:
    return min(max(int(share * size + 1e-9), 1), size)  # 0.29 * 100 is 28.999999999999996


def _of_group(cohort: Mapping[str, int | float], name: str, clients: Mapping[str, int]) -> int:
    if set(cohort) != set(clients):
        raise ConfigError(f"run.sampling.cohort names the groups {sorted(cohort)}, but there are {sorted(clients)}")
    share = cohort[name]
    if isinstance(share, int) and share > clients[name]:
        raise ConfigError(f"run.sampling.cohort.{name} is {share}, but the group has {clients[name]} clients; lower it")
    return share if isinstance(share, int) else _share_of(share, clients[name])


def _apportioned(total: int, groups: list[int]) -> list[int]:
    """``total`` divided among the groups in proportion to their size, by largest remainder, at least one each."""
    exact = [total * size / sum(groups) for size in groups]
    sizes = [max(int(share), 1) for share in exact]
    while sum(sizes) != total:
        # the group that rounding has taken most from gets one more, or that which it has given most gives one
        step = 1 if sum(sizes) < total else -1
        gaps = [step * (share - size) for share, size in zip(exact, sizes, strict=True)]
        open_to = [k for k, size in enumerate(sizes) if (size < groups[k] if step > 0 else size > 1)]
        sizes[max(open_to, key=lambda k: gaps[k])] += step
    return sizes
