"""What explains an export: the model card of the hub, and the page of a folder of programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from markupsafe import Markup

from polyfed.core.version import __version__
from polyfed.export.inputs import Recipe, identifier, import_lines
from polyfed.reporting.markup import markdown_templates
from polyfed.reporting.summary import component_name, setting
from polyfed.reporting.tables import byte_size, format_number
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


def readme(config: Mapping[str, Any], recipes: Mapping[str, Recipe], onnx: Sequence[str] = ()) -> str:
    """Markdown.

    Args:
        config: what ``config.json`` holds.
        recipes: modality -> how its inputs are prepared.
        onnx: names of the programs' ONNX files, if there are any, the first modality's first.
    """
    rows = []
    for key, output in (
        ("program", f"representation of unit norm [batch, {config['dim']}]"),
        ("classes_program", "logits [batch, classes], of masks [batch, classes, height, width]"),
    ):
        for modality, entry in config["modalities"].items():
            shape = ", ".join(map(str, entry["input"]["shape"]))
            if entry[key]:
                rows.append(f"| `{entry[key]}` | {modality} | {entry['input']['dtype']} [{shape}] | {output} |")
    modality, recipe = next(iter(recipes.items()))
    parts = {
        "rows": "\n".join(rows),
        "notes": "\n".join(f"* **{name}**: {item.words}" for name, item in recipes.items()),
        "example": _example(config["modalities"], recipes),
        "onnx": ", ".join(f"`{file}`" for file in onnx),
        "first": onnx[0] if onnx else "",
        "prepared": f"prepare_{identifier(modality)}({recipe.example})",
    }
    template = markdown_templates().get_template("export.md.j2")
    return template.render(
        name=config["experiment"],
        model=config["model"],
        round=config["round"],
        **{name: Markup(part) for name, part in parts.items()},
    )


def _example(modalities: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """Code that prepares an example of every modality, encodes it, and compares the first two."""
    names = {modality: identifier(modality) for modality in modalities}
    functions, loads, calls = [], [], []
    for modality, name in names.items():
        functions.append(recipes[modality].code.strip().replace("PREPARE", f"prepare_{name}"))
        loads.append(f'encode_{name} = torch.export.load("{modalities[modality]["program"]}").module()')
        calls.append(f"    {name} = encode_{name}(prepare_{name}({recipes[modality].example}))")
        calls.append(f'    print("{name}", tuple({name}.shape))')
    first, *others = names.values()
    compare = [f'    print("similarity", ({first} @ {others[0]}.T).tolist())'] if others else []
    body = "\n".join([*loads, "", "with torch.inference_mode():", *calls, *compare])
    return "\n\n\n".join(["\n".join(import_lines(recipes, "import torch")), *functions, body])
