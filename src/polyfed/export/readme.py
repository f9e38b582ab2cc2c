"""The page that explains an export, with an example that runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polyfed.export.inputs import Recipe


def readme(config: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """Markdown.

    Args:
        config: what ``config.json`` holds.
        recipes: modality -> how its inputs are prepared.
    """
    return _PAGE.format(
        name=config["experiment"],
        model=config["model"],
        round=config["round"],
        rows="\n".join(_rows(config)),
        notes="\n".join(f"* **{modality}**: {item.words}" for modality, item in recipes.items()),
        example=example(config, recipes),
    )


def example(config: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> str:
    """Code that prepares an example of every modality, encodes it, and compares the first two."""
    modalities = config["modalities"]
    names = {modality: re.sub(r"\W", "_", modality) for modality in modalities}
    # plain imports first, then those with from, each in the order of the alphabet
    needed = {line for item in recipes.values() for line in item.imports} | {"import torch"}
    imports = sorted(needed, key=lambda line: (line.startswith("from"), line))
    functions = [
        recipes[modality].code.strip().replace("PREPARE", f"prepare_{name}") for modality, name in names.items()
    ]
    loads = [
        f'encode_{name} = torch.export.load("{modalities[modality]["program"]}").module()'
        for modality, name in names.items()
    ]
    calls = [
        f"    {name} = encode_{name}(prepare_{name}({recipes[modality].example}))\n"
        f'    print("{name}", tuple({name}.shape))'
        for modality, name in names.items()
    ]
    first, *rest = names.values()
    compare = [f'    print("similarity", ({first} @ {rest[0]}.T).tolist())'] if rest else []
    body = "\n".join([*loads, "", "with torch.inference_mode():", *calls, *compare])
    return "\n\n\n".join(["\n".join(imports), *functions, body])


def _rows(config: Mapping[str, Any]) -> list[str]:
    outputs = {
        "program": f"representation of unit norm [batch, {config['dim']}]",
        "classes_program": "logits [batch, classes]",
    }
    return [
        f"| `{entry[key]}` | {modality} | {_signature(entry['input'])} | {output} |"
        for key, output in outputs.items()
        for modality, entry in config["modalities"].items()
        if entry[key]
    ]


def _signature(entry: Mapping[str, Any]) -> str:
    return f"{entry['dtype']} [{', '.join(map(str, entry['shape']))}]"


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
