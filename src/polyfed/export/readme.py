"""The page that explains an export, with an example that runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from polyfed.export.inputs import Recipe
from polyfed.reporting.markup import markdown_templates


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
        "prepared": f"prepare_{_word(modality)}({recipe.example})",
    }
    page: str = (
        markdown_templates()
        .get_template("export.md.j2")
        .render(
            name=config["experiment"],
            model=config["model"],
            round=config["round"],
            **{name: Markup(part) for name, part in parts.items()},
        )
    )
    return page


def _word(modality: str) -> str:
    return re.sub(r"\W", "_", modality)


def _example(modalities: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """Code that prepares an example of every modality, encodes it, and compares the first two."""
    names = {modality: _word(modality) for modality in modalities}
    needed = {line for item in recipes.values() for line in item.imports} | {"import torch"}
    # plain imports first, then those with from, each in the order of the alphabet
    imports = sorted(needed, key=lambda line: (line.startswith("from"), line))
    functions, loads, calls = [], [], []
    for modality, name in names.items():
        functions.append(recipes[modality].code.strip().replace("PREPARE", f"prepare_{name}"))
        loads.append(f'encode_{name} = torch.export.load("{modalities[modality]["program"]}").module()')
        calls.append(f"    {name} = encode_{name}(prepare_{name}({recipes[modality].example}))")
        calls.append(f'    print("{name}", tuple({name}.shape))')
    first, *others = names.values()
    compare = [f'    print("similarity", ({first} @ {others[0]}.T).tolist())'] if others else []
    body = "\n".join([*loads, "", "with torch.inference_mode():", *calls, *compare])
    return "\n\n\n".join(["\n".join(imports), *functions, body])
