"""Accounts of the sources of a federation, for dry runs, run folders and reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyfed.data.source import Accounts, Count, LeftOut, Split
from polyfed.data.view import View
from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment

ACCOUNTS = "accounts.json"
"""File of a run folder with the counts of each source."""


def accounts_of(experiment: Experiment, federation: Population) -> dict[str, tuple[Count, ...]]:
    """Source -> its counts, and those of what the views of its participants cut off.

    Sources whose data lie at other sites are not among them.

    Raises:
        DataError, ConfigError: a source or a view cannot be opened.
    """
    read = [(split, name, view) for split, views in _views(experiment, federation) for name, view in views.items()]
    folder, context = experiment.data.data_folder, federation.data.context
    tasks = [member.settings.task for member in federation.members.values()]
    tasks += [experiment.server.task] if experiment.server else []
    targets = {target for task in tasks for target in task.target_views}
    accounts = dict[str, tuple[Count, ...]]()
    for source in dict.fromkeys(split.source for split, _, _ in read):
        counts = list(experiment.data.sources[source].account(name=source, data_dir=folder, used=targets))
        seen = set[str]()
        for split, modality, view in read:
            key = f"{split.name} {modality} {view.model_dump_json()}"
            if split.source == source and modality in split.columns and key not in seen:
                seen.add(key)
                counts += filter(None, [view.cut(split.modality(modality), modality, context)])
        accounts[source] = (*counts, *_held(federation, source))
    return accounts


def _held(federation: Population, source: str) -> Iterator[Count]:
    """Counts of the items of each split that is dealt out, by whether any participant has them."""
    shares = [
        (holding.assignment.split, holding.items) for one in federation.members.values() for holding in one.holdings
    ]
    shares += [] if federation.public is None else [(federation.public.split, federation.public.all_items)]
    held: dict[str, tuple[Split, set[int]]] = {}
    for split, items in shares:
        if split.source == source:
            held.setdefault(split.name, (split, set()))[1].update(items.tolist())
    for name, (split, own) in held.items():
        left_out = [LeftOut("held by no participant", len(split) - len(own))]
        yield Count.of(f"items dealt ({name})", len(split), len(own), left_out)


def _views(experiment: Experiment, federation: Population) -> Iterator[tuple[Split, dict[str, View]]]:
    """Splits that are trained on, each with the views of a participant."""
    for member in federation.members.values():
        yield member.holdings[0].assignment.split, dict(member.views)
    if experiment.server is not None and experiment.public is not None:
        views = {name: encoder.view for name, encoder in experiment.server.model.encoders.items()}
        yield federation.data.split(experiment.public.source, experiment.public.split), views


def plain(accounts: Accounts) -> dict[str, list[dict[str, Any]]]:
    """Accounts for a file."""
    return {source: [count.plain() for count in counts] for source, counts in accounts.items()}
