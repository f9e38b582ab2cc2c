"""Checks of a site's data and models: what a client would hold and compute, on one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from polyfed.deploy.findings import Finding

if TYPE_CHECKING:
    from polyfed.deploy.site_config import SiteConfig
    from polyfed.federation.membership import Member
    from polyfed.federation.population import Population

_SHOWN_CLASSES = 12


def check_holding(population: Population, member: Member) -> Iterator[Finding]:
    """A client's private samples, by class where there are labels, and its test samples."""
    held = population.holding(member)
    test = population.test(member)
    detail = f"{held['items']:,} items, {held['samples']:,} samples of '{held['source']}' {held['split']}"
    if isinstance(also := held.get("also"), dict):
        of = "the public set" if also["public"] else f"'{also['source']}' {also['split']}"
        detail += f", among them {also['items']:,} items of {of}"
    detail += ", no test" if test is None else f", {len(test):,} for test"
    if held["labels"]:
        detail += f"; {_classes(cast('Mapping[str, int]', held['labels']))}"
    yield Finding("ok", f"data of {member.id}", detail)


def check_public(population: Population, config: SiteConfig) -> Iterator[Finding]:
    """The public set is here, in the agreed order, and disjoint from what is private."""
    public = population.public
    if public is None:
        yield Finding("ok", "public set", "none")
        return
    samples = len(public.samples({}))
    detail = f"{len(public.items):,} items, {samples:,} samples of '{public.settings.source}', {public.order}"
    if config.public_digest is None:
        yield Finding("ok", "public set", f"{detail}; no public_digest in site.yaml to compare with")
    elif public.order == config.public_digest:
        yield Finding("ok", "public set", f"{detail}, as agreed")
    else:
        yield Finding(
            "error",
            "public set",
            f"{detail}, but agreed is {config.public_digest}",
            "compare 'public', its source's files, and 'seed' in connection.yaml with the server's",
        )
    population.require_sound()


def check_model(population: Population, member: Member, config: SiteConfig) -> Iterator[Finding]:
    """A client's model can be built, and takes one of its batches."""
    import torch

    from polyfed.core.device import resolve_device
    from polyfed.core.randomness import isolated

    device = resolve_device(config.run.device)
    model = population.client_model(member).to(device)
    samples = population.train(member)
    batch = samples.batch(torch.arange(min(len(samples), member.settings.training.batch_size)), None).to(device)
    head = model.heads[member.head] if member.head in model.heads else None
    with isolated(population.seed, "check", member.id):
        loss = float(member.settings.task.loss(model, head, batch).detach())
    count = sum(value.numel() for value in model.parameters())
    detail = f"{count:,} parameters, width {model.dim}, {'+'.join(model.modalities)}"
    if not math.isfinite(loss):
        remedy = "look at the inputs for NaN, and at the view's normalisation"
        yield Finding(
            "error", f"model of {member.id}", f"{detail}; its loss on a batch of {len(batch)} is {loss}", remedy
        )
    else:
        yield Finding("ok", f"model of {member.id}", f"{detail}; loss on a batch of {len(batch)}: {loss:.3f}")


def _classes(counts: Mapping[str, int]) -> str:
    shown = [f"{name} {number:,}" for name, number in list(counts.items())[:_SHOWN_CLASSES]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more classes" if more else "")
