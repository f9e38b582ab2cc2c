"""The model card of an export: what a reader must know before using a model that a federation trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from markupsafe import Markup

from polyfed.core.version import __version__
from polyfed.export.inputs import Recipe
from polyfed.reporting.markup import markdown_templates
from polyfed.reporting.run_figures import byte_size
from polyfed.reporting.summary import component_name, setting
from polyfed.reporting.tables import format_number
from polyfed.runs.records import SERVER, RunRecords


def model_card(records: RunRecords, config: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """Markdown with metadata of the hub: data, method, metrics, federation, privacy, and how to use it.

    Args:
        records: of the run.
        config: of the export.
        recipes: modality -> how its inputs are prepared.
    """
    method = component_name(setting(records.config, "algorithm"))
    meta = {
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["polyfed", "federated-learning", "multimodal", *([method] if method else []), *config["modalities"]],
    }
    metrics = measured_in(records, number := int(config["round"]))
    template = markdown_templates().get_template("card.md.j2")
    return (
        "---\n"
        + yaml.safe_dump(meta, sort_keys=False)
        + "---\n\n"
        + template.render(
            config=config,
            version=__version__,
            method=method,
            settings=_plain(setting(records.config, "algorithm")),
            sources=_sources(records.config),
            public=_plain(records.config.get("public")),
            metrics=metrics,
            groups={group: _group(records, members) for group, members in records.groups.items()},
            rounds=number,
            seed=setting(records.config, "run", "seed"),
            sent={direction: byte_size(records.total_bytes(direction)) for direction in ("up", "down")},
            kinds=sorted({entry.kind for entry in records.transfers if entry.direction == "up"} - {"framing"}),
            inputs={modality: Markup(recipe.words) for modality, recipe in recipes.items()},
            first=next(iter(recipes)),
            example=Markup(next(iter(recipes.values())).example),
        )
    )


def measured_in(records: RunRecords, number: int) -> dict[str, str]:
    """Metrics of the server in a round, which is that of a saved model."""
    return {
        f"{name} ({kind})": format_number(value)
        for kind in ("test", "validation")
        for name in records.metric_names(SERVER, kind)
        if (value := records.series(SERVER, name, kind).get(number)) is not None
    }


def _plain(section: Any) -> dict[str, str]:
    known = section.items() if isinstance(section, Mapping) else ()
    return {str(key): str(value) for key, value in known if isinstance(value, str | int | float | bool)}


def _sources(config: Mapping[str, Any]) -> dict[str, str]:
    """Name of a source -> what it is and where from; no path of a machine."""
    sources = setting(config, "data", "sources")
    kept = ("name", "repository", "revision", "data", "seed", "train")
    return {
        str(name): ", ".join(f"{key} {source[key]}" for key in kept if source.get(key) is not None)
        for name, source in (sources.items() if isinstance(sources, Mapping) else ())
        if isinstance(source, Mapping)
    }


def _group(records: RunRecords, members: tuple[str, ...]) -> str:
    held = [records.holdings[client] for client in members if client in records.holdings]
    words = f"{len(members)} client{'s' if len(members) > 1 else ''}"
    if held:
        words += f", {sum(entry.items for entry in held):,} items of {', '.join(sorted({h.source for h in held}))}"
    return words
