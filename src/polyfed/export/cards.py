"""Pages that explain an export: the model card of the hub, and the README of a folder of programs."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from polyfed.core.untrusted import file_json
from polyfed.core.version import __version__
from polyfed.export.inputs import Recipe, identifier, import_lines
from polyfed.reporting.markup import markdown_templates, resource
from polyfed.reporting.summary import component_name, setting
from polyfed.reporting.tables import byte_size, format_number
from polyfed.runs.records import SERVER, RunRecords


def model_card(records: RunRecords, config: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """Markdown with metadata of the hub: data, method, metrics, federation, privacy, and use.

    Args:
        records: records of the run.
        config: configuration of the export.
        recipes: modality -> preparation of its inputs.
    """
    method = component_name(setting(records.config, "algorithm"))
    meta = {
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["polyfed", "federated-learning", "multimodal", *([method] if method else []), *config["modalities"]],
    }
    metrics = measured_in(records, number := int(config["round"]))
    return (
        "---\n"
        + yaml.safe_dump(meta, sort_keys=False)
        + "---\n\n"
        + markdown_templates()
        .get_template("card.md.j2")
        .render(
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
    """Metrics of the server in the round of a saved model."""
    return {
        f"{name} ({split})": format_number(value)
        for split in ("test", "validation")
        for name in records.metric_names(SERVER, split)
        if (value := records.series(SERVER, name, split).get(number)) is not None
    }


def _plain(section: Any) -> dict[str, str]:
    known = section.items() if isinstance(section, Mapping) else ()
    return {str(key): str(value) for key, value in known if isinstance(value, str | int | float | bool)}


def _sources(config: Mapping[str, Any]) -> dict[str, str]:
    """Name of a source -> description and origin, without paths of a machine."""
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


def readme(config: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """README of a folder of programs.

    Args:
        config: content of ``config.json``.
        recipes: modality -> preparation of its inputs.
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
    parts = {
        "rows": "\n".join(rows),
        "notes": "\n".join(f"* **{name}**: {item.words}" for name, item in recipes.items()),
        "command": example_command(config["modalities"]),
        "example": _example(recipes),
    }
    return (
        markdown_templates()
        .get_template("export.md.j2")
        .render(
            name=config["experiment"],
            model=config["model"],
            round=config["round"],
            needs=", ".join(config["needs"]),
            networks=config["networks"],
            **{name: Markup(part) for name, part in parts.items()},
        )
    )


def _example(recipes: Mapping[str, Recipe]) -> str:
    """Code that encodes an example of every modality, and compares the first two."""
    names = {identifier(modality): modality for modality in recipes}
    calls = [f"{name} = encode({json.dumps(key)}, {recipes[key].example})" for name, key in names.items()]
    calls += [f'print("{name}", tuple({name}.shape))' for name in names]
    first, *others = names
    calls += [f'print("similarity", ({first} @ {others[0]}.T).tolist())'] if others else []
    own = [line for line in ("import torch", "from PIL import Image") if f"{line.split()[-1]}." in "".join(calls)]
    return "\n".join([*own, "from run import encode", "", *calls])


# ---- the file that runs an export

_OWN_IMPORTS = ("import argparse", "import functools", "import json", "import sys", "import torch")
_VALUES = {"pictures": "a.jpg b.jpg", "texts": '"a text" "another text"', "numbers": "values.json"}


def example_command(modalities: Mapping[str, Any], file: str = "run.py") -> str:
    """A command that runs an export."""
    return " ".join([f"python {file}", *(f"{one['option']} {_VALUES[one['takes']]}" for one in modalities.values())])


def run_file(config: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """A Python file that encodes, compares and classifies with the programs next to it, without polyfed.

    Its code holds names of modalities alone; other words of a run are read from ``config.json``.
    """
    names = {modality: f"prepare_{identifier(modality)}" for modality in recipes}
    code = [
        *dict.fromkeys(recipe.functions.strip() for recipe in recipes.values() if recipe.functions),
        *(recipe.code.strip().replace("PREPARE", names[modality]) for modality, recipe in recipes.items()),
        "PREPARATIONS = {" + ", ".join(f"{json.dumps(modality)}: {name}" for modality, name in names.items()) + "}",
    ]
    # files lie next to this one
    own = re.sub(r'Tokenizer\.from_file\(("[^"]+")\)', r"Tokenizer.from_file(str(HERE / \1))", "\n\n\n".join(code))
    own = re.sub(r'from_pretrained\(("[^"]+"),', r"from_pretrained(HERE / \1,", own)
    parts = {
        "COMMAND": example_command(config["modalities"]),
        "NEEDS": ", ".join(config["needs"]),
        "# ---- imports\n": "\n".join(import_lines(recipes, *_OWN_IMPORTS, "from pathlib import Path")) + "\n",
        "# ---- functions\n": f"\n\n{own}\n\n\n",
    }
    return functools.reduce(lambda text, part: text.replace(*part, 1), parts.items(), resource("run.txt"))


def usage(folder: Path, form: str) -> Iterator[str]:
    """Contents of an export, its use and its requirements, a line each."""
    yield f"it has {byte_size(sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()))}"
    if form == "peft":
        yield "it needs peft, transformers and the networks that README.md names, which are not in it"
        return
    config = file_json((folder / "config.json").read_text("utf-8"))
    if config["networks"]:
        yield f"pretrained networks are in it, whose licences go with them: {', '.join(config['networks'])}"
    if form != "huggingface":
        yield f"run it from anywhere: {example_command(config['modalities'], shlex.quote(str(folder / 'run.py')))}"
    yield f"it needs {', '.join(config['needs'])}, and no polyfed"
    if numbers := [modality for modality, entry in config["modalities"].items() if entry["takes"] == "numbers"]:
        yield f"inputs of {', '.join(numbers)} are numbers, which README.md describes"
