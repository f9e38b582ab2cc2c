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
    page = _PAGE.format(
        name=config["experiment"],
        model=config["model"],
        round=config["round"],
        rows="\n".join(rows),
        notes="\n".join(f"* **{modality}**: {item.words}" for modality, item in recipes.items()),
        example=_example(config["modalities"], recipes),
    )
    return page + (_onnx_section(onnx, *next(iter(recipes.items()))) if onnx else "")


def _onnx_section(files: Sequence[str], modality: str, recipe: Recipe) -> str:
    return (
        markdown_templates()
        .get_template("onnx.md.j2")
        .render(
            files=Markup(", ".join(f"`{file}`" for file in files)),
            first=Markup(files[0]),
            prepare=Markup("prepare_" + re.sub(r"\W", "_", modality)),
            example=Markup(recipe.example),
        )
    )


def _example(modalities: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """Code that prepares an example of every modality, encodes it, and compares the first two."""
    names = {modality: re.sub(r"\W", "_", modality) for modality in modalities}
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


_PAGE = """# {name}: server model of round {round} ({model})

Trained with polyfed, but the programs need torch alone, and the example below what it imports. When they were
exported, all programs were compared with the trained model.

| program | modality | input | output |
| --- | --- | --- | --- |
{rows}

Any batch size will do. Representations of different modalities are comparable: their product is a cosine
similarity. `config.json` describes architecture, inputs and (for logits) classes in full; `model.safetensors`
holds the weights by name.

How inputs are prepared:

{notes}

## Example

Run it in this folder:

```python
{example}
```
"""
