"""Checks of a federation before a run: models fit tasks, and public, private and test items are apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Int64
from torch import Tensor

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.assembly import require_disjoint
from polyfed.data.source import Split
from polyfed.federation.types import Outline, outline_of

if TYPE_CHECKING:
    from polyfed.federation.membership import Member
    from polyfed.federation.population import Population


def require_models(population: Population) -> None:
    """Check that each group's model can be built and trained for its task, and has the tensors of its type.

    Raises:
        ConfigError: it is not so.
    """
    known: dict[str, tuple[str, Outline]] = {}
    infos = {info.id: info for info in population.infos}
    for member in {member.group: member for member in population.members.values()}.values():
        architecture = infos[member.id].architecture
        outline = outline_of(population.client_model(member).state_dict())
        other, expected = known.setdefault(architecture, (member.group, outline))
        if outline != expected:
            raise ConfigError(
                f"clients '{other}' and '{member.group}' have one model and one task, but tensors of other shapes; "
                f"keep them apart with clients.{member.group}.type"
            )


def require_disjoint_data(population: Population) -> None:
    """Check that what clients hold in addition is not tested on nor held twice, and that public items are only public.

    Raises:
        DataError: items are where they must not be.
    """
    judged = [
        (f"'{source}' {name}", population.data.split(source, name).ids) for source, name in sorted(_judged(population))
    ]
    for member in population.members.values():
        _require_additional(population, member, judged)
    if population.public is None:
        return
    public = _ids(population.public.split, population.public.items)
    for member in population.members.values():
        for private in _private_ids(population, member):
            require_disjoint(public, private, f"client '{member.id}'")
    for what, ids in judged:
        require_disjoint(public, ids, f"{what}, which participants are judged on")


def _require_additional(population: Population, member: Member, judged: Sequence[tuple[str, Sequence[str]]]) -> None:
    if member.also is None:
        return
    also = set(_ids(population.membership.also_assignments[member.group].split, member.also))
    own = _ids(population.data.split(member.settings.source, member.settings.split), member.items)
    for what, others in (
        *((f"{what}, which participants are judged on", ids) for what, ids in judged),
        ("its own", own),
    ):
        if shared := also & set(others):
            raise DataError(
                f"clients.{member.group}.also: {len(shared)} items of client '{member.id}' are in {what}, for example "
                f"'{min(shared)}'; name data that nobody is tested on and that it does not hold already"
            )


def _private_ids(population: Population, member: Member) -> Iterator[list[str]]:
    yield _ids(population.data.split(member.settings.source, member.settings.split), member.items)
    also = member.settings.also
    if also is not None and not also.public and member.also is not None:
        yield _ids(population.membership.also_assignments[member.group].split, member.also)


def _ids(split: Split, items: Int64[Tensor, " k"]) -> list[str]:
    return [split.ids[item] for item in items.tolist()]


def _judged(population: Population) -> set[tuple[str, str]]:
    judged = {(group.source, group.test_split) for group in population.groups.values()}
    server = population.server
    if server is not None:
        judged |= {(server.source, server.test_split), (server.source, server.validation_split)}
    return {(source, name) for source, name in judged if name is not None}


def require_equal_width(population: Population) -> None:
    """Check that all participants of a federation with a public set have representations of one width.

    Raises:
        ConfigError: they differ.
    """
    widths = {member.id: member.model.dim for member in population.members.values()}
    if population.server is not None:
        widths["server"] = population.server.model.dim
    if len(set(widths.values())) > 1:
        low, high = min(widths, key=widths.__getitem__), max(widths, key=widths.__getitem__)
        raise ConfigError(
            f"model.dim must be equal for all who share a public set: '{low}' has {widths[low]}, "
            f"'{high}' has {widths[high]}"
        )


def require_test_items(population: Population) -> None:
    """Check that the server is tested on as many items as it expects.

    Raises:
        ConfigError: there are more or fewer.
    """
    settings = population.server
    if settings is None or settings.expected_test_items is None:
        return
    count = len(population.data.split(settings.source, settings.test_split))
    if count != settings.expected_test_items:
        raise ConfigError(
            f"server.expected_test_items is {settings.expected_test_items}, but '{settings.source}' "
            f"{settings.test_split} has {count} items; recalls would be of another gallery than they are named after; "
            f"provide that split, or set server.expected_test_items={count} and adapt server.task.folds"
        )
