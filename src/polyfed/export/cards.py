"""What explains an export: the model card of the hub, and the page of a folder of programs."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
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
        "command": example_command(config["modalities"]),
        "example": _example(recipes),
        "onnx": ", ".join(f"`{file}`" for file in onnx),
        "first": onnx[0] if onnx else "",
        "prepare": f"prepare_{identifier(modality)}",
        "prepared": f"prepare_{identifier(modality)}({recipe.example})",
    }
    template = markdown_templates().get_template("export.md.j2")
    return template.render(
        name=config["experiment"],
        model=config["model"],
        round=config["round"],
        needs=", ".join(config["needs"]),
        networks=config["networks"],
        **{name: Markup(part) for name, part in parts.items()},
    )


def _example(recipes: Mapping[str, Recipe]) -> str:
    """Code that encodes an example of every modality, and compares the first two."""
    names = {identifier(modality): modality for modality in recipes}
    calls = [
        f"{name} = encode({json.dumps(modality)}, {recipes[modality].example})" for name, modality in names.items()
    ]
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
    return " ".join(
        [f"python {file}", *(f"{entry['option']} {_VALUES[entry['takes']]}" for entry in modalities.values())]
    )


def run_file(config: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """A Python file that encodes, compares and classifies with the programs beside it, and does without polyfed.

    Of a run's own words its code has names of modalities alone: what it shows it reads from ``config.json``.
    """
    names = {modality: f"prepare_{identifier(modality)}" for modality in recipes}
    code = [
        *dict.fromkeys(recipe.functions.strip() for recipe in recipes.values() if recipe.functions),
        *(recipe.code.strip().replace("PREPARE", names[modality]) for modality, recipe in recipes.items()),
        "PREPARATIONS = {" + ", ".join(f"{json.dumps(modality)}: {name}" for modality, name in names.items()) + "}",
    ]
    # files lie beside this one
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
        yield "it needs the networks that README.md names, which are not in it, and peft and transformers"
        return
    config = file_json((folder / "config.json").read_text("utf-8"))
    if config["networks"]:
        yield f"pretrained networks are in it, whose licences go with them: {', '.join(config['networks'])}"
    if form != "huggingface":
        yield f"run it from anywhere: {example_command(config['modalities'], shlex.quote(str(folder / 'run.py')))}"
    yield f"it needs {', '.join(config['needs'])}, and no polyfed"
    if numbers := [modality for modality, entry in config["modalities"].items() if entry["takes"] == "numbers"]:
        yield f"inputs of {', '.join(numbers)} it takes as numbers, which README.md describes"
