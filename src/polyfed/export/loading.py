"""``load_model``: a trained model for use, from a run or from a folder of ``polyfed export``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import named_in, require_plain, whole
from polyfed.core.untrusted import file_json
from polyfed.data.backbones import NO_CODE
from polyfed.data.samples import Batch, Inputs
from polyfed.data.source import Column
from polyfed.data.tokenizers import Hashing, Vocabulary, encoder
from polyfed.data.view import DataContext, View
from polyfed.data.views.features import Features
from polyfed.data.views.tokens import TokenRows, Tokens, matrix_of
from polyfed.export.programs import Live, loaded_program, padded
from polyfed.runs.loaded import LoadedClassifier, LoadedEncoder, LoadedModel, opened_apart
from polyfed.runs.opened import open_run


def load_model(
    path: Path | str,
    participant: str | None = None,
    *,
    which: str | None = None,
    data_dir: Path | str | None = None,
    weights_dir: Path | str | None = None,
    device: str | None = None,
    allow_code: bool = False,
) -> LoadedModel:
    """A trained model for use: ``encode``, ``similarity`` and ``search`` of images and texts.

    Args:
        path: run folder, or folder of ``polyfed export``.
        participant: participant of a run: ``server`` (the default), or a client's id.
        which: model of a run: ``best``, ``last`` or a round; by default the server's best.
        data_dir: folder of data sets, if it has moved since the run.
        weights_dir: folder of pretrained weights, if it has moved.
        device: device of the model; by default the run's, or the CPU for an export.
        allow_code: allow code: classes that a run names by import path, see ``polyfed.open_run``; always needed for an
            export, as its programs may do anything when they are loaded.

    Raises:
        RunError: the model does not exist or is damaged.
        ConfigError: the model lacks what is requested, or holds code, which is not allowed.
    """
    path = Path(path)
    if (path / "config.yaml").is_file():
        opened = open_run(path, data_dir=data_dir, weights_dir=weights_dir, device=device, allow_code=allow_code)
        return opened.model_of(participant or "server", which)
    if not (path / "config.json").is_file():
        raise RunError(f"'{path}' is neither a run folder nor an export (no config.yaml or config.json in it)")
    asked = {"participant": participant, "which": which, "device": device}
    if wrong := [f"{key} '{value}'" for key, value in asked.items() if value is not None]:
        raise ConfigError(f"'{path}' is an export, which holds one model for the CPU; leave out {', '.join(wrong)}")
    if not allow_code:  # torch.export.load unpickles, and evaluates expressions, as programs may hold any objects
        raise ConfigError(f"'{path}' is an export, its programs are code; if you trust it, pass allow_code=True")
    require_plain(path)
    return _exported(path, None if weights_dir is None else whole(weights_dir))


def _exported(folder: Path, weights_dir: Path | None) -> LoadedModel:
    try:
        config = file_json((folder / "config.json").read_text("utf-8"))
        name, dim = f"{config['experiment']}, {config['model']}", int(config["dim"])
        entries, task = config["modalities"], config["task"]
        encoders = {name: _encoder(folder, name, entry, weights_dir, task) for name, entry in entries.items()}
        logits = {
            name: _program(folder, entry, "classes_program")
            for name, entry in entries.items()
            if entry["classes_program"] and task["name"] != "segmentation"
        }
        decision = LoadedClassifier(tuple(config["classes"] or ()), tuple(logits), True, partial(_mean_logits, logits))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ValidationError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunError(f"'{folder}': the export is incomplete ({reason}); write it again") from error
    return LoadedModel(name, dim, encoders, {str(task.get("target")): decision} if logits else {})


def _mean_logits(logits: Mapping[str, Live], batch: Batch) -> Tensor:
    """Logits of a linear classifier for the mean embedding of the modalities that a sample has."""
    every = torch.ones(len(batch), dtype=torch.bool)
    masks = {name: batch.present.get(name, every)[:, None] for name in batch.inputs}
    parts = [torch.where(mask, logits[name](batch.inputs[name]), 0.0) for name, mask in masks.items()]
    return torch.stack(parts).sum(0) / torch.stack([*masks.values()]).sum(0)


def _encoder(
    folder: Path, modality: str, entry: Mapping[str, Any], weights_dir: Path | None, task: Mapping[str, Any]
) -> LoadedEncoder:
    view = View.model_validate(entry["preparation"]["view"])
    if isinstance(view, Features) and weights_dir is None and not Path(view.backbone).is_absolute():
        weights_dir = named_in("POLYFED_WEIGHTS")
    context = DataContext(cache=folder, weights=weights_dir)
    opener = _opener(folder, modality, view, entry["preparation"], context)
    segments = task.get("name") == "segmentation" and entry["classes_program"]
    masks = _program(folder, entry, "classes_program") if segments else None
    return LoadedEncoder(view, opener, _program(folder, entry, "program"), masks)


def _program(folder: Path, entry: Mapping[str, Any], key: str) -> Live:
    program = loaded_program(folder / entry[key])
    length = entry["input"]["shape"][1] if entry["input"]["dtype"] == "int64" else None
    fixed, pad = (length if isinstance(length, int) else None), int(entry["preparation"].get("pad", 0))

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return program(padded(x, fixed, pad))

    return run


def _opener(
    folder: Path, modality: str, view: View, facts: Mapping[str, Any], context: DataContext
) -> Callable[[Column], Inputs]:
    """Maps raw values to inputs, by the view itself or by the tokenizer in the export."""
    if not isinstance(view, Tokens) or isinstance(view.tokenizer, Hashing):
        return lambda column: opened_apart(view, column, modality, context)
    length, vocabulary = view.length, _vocabulary(folder, facts)
    return lambda column: TokenRows(matrix_of(vocabulary, column.texts(), length), vocabulary)


def _vocabulary(folder: Path, facts: Mapping[str, Any]) -> Vocabulary:
    pad, unknown = int(facts["pad"]), int(facts["unknown"])
    if "tokenizer" in facts:
        import tokenizers

        pipeline = tokenizers.Tokenizer.from_file(str(folder / facts["tokenizer"]))
        pipeline.no_padding()  # batches are padded where they are made
        return Vocabulary((), encoder(pipeline), pad, unknown, pipeline=pipeline)
    opened = folder / Path(facts["vocabulary"]).stem.replace("vocabulary", "tokenizer")
    if not opened.is_dir():
        raise RunError(f"'{folder}' has no tokenizer for its texts, as theirs is outside of polyfed; use its run")
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(opened, local_files_only=True, **NO_CODE)

    def encode(texts: Any, length: int) -> list[list[int]]:
        rows: list[list[int]] = own(list(texts), truncation=True, max_length=length)["input_ids"]
        return rows

    return Vocabulary((), encode, pad, unknown)
