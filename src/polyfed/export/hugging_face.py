"""An export as a folder of the Hugging Face hub: weights, configuration, and code that needs torch and transformers.

config.json             widths, modalities, and names, shapes and types of the tensors
modeling_polyfed.py     the networks, written out operation by operation from their traced programs
model.safetensors       all tensors, also those that are not trained
tokenizer.json          of the library ``tokenizers``, where a modality has tokens
README.md               model card: data, method, metrics, federation, privacy
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor, fx

from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically
from polyfed.core.tensor_files import tensor_blocks
from polyfed.export.cards import model_card
from polyfed.export.inputs import Recipe, identifier, import_lines
from polyfed.export.model import Exported, export_programs, new_folder
from polyfed.reporting.markup import resource
from polyfed.runs.opened import Run, as_run

_CODE = "modeling_polyfed"
_KNOWN = {"torch", "device", "inf", "nan", "fx_pytree", "pytree", "NoneType", "math", "operator", "_operator"}


def export_hugging_face(run: Run | Path | str, out: Path | str | None = None, *, which: str | None = None) -> Path:
    """Export a run's model as a Hugging Face folder; it appears complete and checked, or not at all.

    ``AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`` loads it, offline and without polyfed.

    Args:
        run: run folder; or a run as ``open_run`` gives it, with pretrained weights elsewhere.
        out: new folder; by default ``hugging-face`` in the run folder.
        which: ``best`` or ``last``; by default ``best`` if there is one.

    Returns:
        The folder.

    Raises:
        RunError: see ``export_model``; or an encoder cannot be written as code.
        ConfigError: pretrained weights are not there.
    """
    on_cpu = replace(as_run(run), device="cpu")
    out = Path(out) if out else on_cpu.folder / "hugging-face"
    with new_folder(out) as draft, tempfile.TemporaryDirectory() as place:
        exported = export_programs(on_cpu, Path(place), which)
        _write(exported, Path(place), draft)
        card = model_card(on_cpu.records, exported.config, exported.recipes)
        (draft / "README.md").write_text(card, "utf-8")
    return out


def _write(exported: Exported, programs: Path, draft: Path) -> None:
    tensors: dict[str, Tensor] = {}
    functions, types = [], {}
    for modality, program in exported.programs.items():
        name = identifier(modality)
        code, own = network_code(torch.export.load(program.path).module(check_guards=False), name)
        functions.append(code)
        types[name] = {key: [list(value.shape), str(value.dtype).removeprefix("torch.")] for key, value in own.items()}
        tensors |= {f"networks.{name}.{key}": value for key, value in own.items()}
    write_atomically(draft / "model.safetensors", tensor_blocks(tensors, {"format": "pt"}))
    config = {
        "architectures": ["PolyfedModel"],
        "auto_map": {"AutoConfig": f"{_CODE}.PolyfedConfig", "AutoModel": f"{_CODE}.PolyfedModel"},
        "model_type": "polyfed",
        "dtype": "float32",
        "tensors": types,
        "needs": ["transformers", *exported.config["needs"]],
        **{key: exported.config[key] for key in ("experiment", "model", "round", "dim", "networks")},
        "modalities": {
            identifier(name): {key: entry[key] for key in ("input", "takes", "preparation")}
            for name, entry in exported.config["modalities"].items()
        },
    }
    (draft / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (draft / f"{_CODE}.py").write_text(_modeling(exported.recipes, functions), "utf-8")
    for path in programs.iterdir():  # tokenizers and vocabularies
        if path.name.startswith(("tokenizer", "vocabulary")):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, draft / path.name)


def network_code(module: fx.GraphModule, name: str) -> tuple[str, dict[str, Tensor]]:
    """A traced network as the source of a function of its tensors by name and an input, and these tensors.

    Raises:
        RunError: it has operations that cannot be written so.
    """
    # these checks name the trace's device
    for node in [node for node in module.graph.nodes if "_assert_tensor_metadata" in str(node.target)]:
        module.graph.erase_node(node)
    targets = {str(node): str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    values = {path: attrgetter(path)(module) for path in targets.values()}
    written = module.graph.python_code("self")
    tensors = {path: value for path, value in values.items() if isinstance(value, Tensor)}
    odd = [path for path in values if path not in tensors]
    odd += [key for key in written.globals if key.split(".")[0] not in _KNOWN]
    if odd:
        raise RunError(f"encoder '{name}' cannot be written as code, for {', '.join(odd)}; choose another format")
    lines = filter(None, (_rewritten(line, targets) for line in written.src.splitlines()))
    return "\n".join([f"def network_{name}(tensors, x):", "    place = x.device", *lines]), tensors


def _rewritten(line: str, targets: Mapping[str, str]) -> str:
    """A line of traced code with tensors by their names and plain input and output; empty: left out."""
    if given := re.match(r"\s+(\w+), = fx_pytree\.", line):
        return "" if given[1] == "x" else f"    {given[1]} = x"
    assigned = re.match(r"\s+(\w+) = (?:self\.|getattr\()", line)
    if assigned and assigned[1] in targets:
        return f'    {assigned[1]} = tensors["{targets[assigned[1]]}"]'
    if returned := re.match(r"\s+return pytree\.tree_unflatten\(\((\w+),\), self\._out_spec\)", line):
        return f"    return {returned[1]}"
    is_body = re.match(r" {4}\S", line) is not None
    return line.replace("device(type='cpu')", "place") if is_body else ""


def _modeling(recipes: Mapping[str, Recipe], functions: list[str]) -> str:
    """Code of the file: preparation of inputs, the networks, and the model around them."""
    prepares = [*dict.fromkeys(recipe.functions.strip() for recipe in recipes.values() if recipe.functions)]
    for modality, recipe in recipes.items():
        code = (
            recipe.code.strip()
            .replace("def PREPARE(", f"def prepare_{identifier(modality)}(")
            .replace("):", ", place):", 1)
        )
        # files lie next to the weights, in a folder or on the hub
        code = re.sub(r'Tokenizer\.from_file\(("[^"]+")\)', r"Tokenizer.from_file(cached_file(place, \1))", code)
        code = re.sub(r'from_pretrained\(("[^"]+"),', r"from_pretrained(place, subfolder=\1,", code)
        prepares.append(code)
    names = [identifier(modality) for modality in recipes]
    tables = [
        "PREPARATIONS = {" + ", ".join(f'"{name}": prepare_{name}' for name in names) + "}",
        "NETWORKS = {" + ", ".join(f'"{name}": network_{name}' for name in names) + "}",
    ]
    head, tail = resource("modeling.txt").split("# ---- networks\n")
    head = head.replace("# ---- imports\n", "\n".join(import_lines(recipes)) + "\n").rstrip()
    return "\n\n\n".join([head, *prepares, *functions, "\n".join(tables), tail.strip()]) + "\n"
