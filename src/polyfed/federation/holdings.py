"""What a client holds, as it is written into the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.federation.assignment import Assignment

if TYPE_CHECKING:
    from polyfed.federation.membership import Member
    from polyfed.federation.population import Population


def holding(population: Population, member: Member) -> dict[str, object]:
    """What a client holds; nothing but columns of classes and lists is read for it.

    ``items`` and ``samples`` are all that it holds; of these, ``also`` says what is of the public set or of a second
    source. ``index`` and the counts by class are of its own source.
    """
    assignment = population.membership.assignments[member.group]
    split, shaping = assignment.split, tuple(member.model.encoders)
    own = _held(assignment, split, population.data.samples(split, {}, layout=shaping), member.items)
    entry: dict[str, object] = {"group": member.group, **own}
    if member.settings.test == "dealt":
        entry["test"] = assignment.test_counts(population.test_items(member))
    if member.also is not None and member.settings.also is not None:
        second = population.membership.also_assignments[member.group]
        layout = population.public_samples({}) if member.settings.also.public else None
        layout = layout or population.data.samples(second.split, {}, layout=shaping)
        also = _held(second, second.split, layout, member.also)
        entry["also"] = {"public": member.settings.also.public, **also}
        entry |= {key: own[key] + also[key] for key in ("items", "samples")}
    left_out = dict(getattr(split, "left_out", {}))
    return entry | ({"left_out": left_out} if left_out else {})


def _held(assignment: Assignment, split: Split, layout: Samples, items: Int64[Tensor, " k"]) -> dict[str, Any]:
    return {
        "source": split.source,
        "split": split.name,
        "items": len(items),
        "samples": int(torch.isin(layout.items, items).sum()),
        **assignment.counts(items),
        "index": items.tolist(),
    }
