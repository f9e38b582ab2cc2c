"""Networks as ``torch.export`` programs: saved, loaded again, and compared with the live model; ``load_model``."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from pydantic import ValidationError
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import named_in, require_plain, whole
from polyfed.core.untrusted import file_json
from polyfed.data.backbones import NO_CODE, Backbone, channels_last, frozen_backbone, locate
from polyfed.data.samples import Batch, Inputs
from polyfed.data.source import Column
from polyfed.data.tokenizers import Hashing, Vocabulary, encoder
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.features import Features, Native
from polyfed.data.views.tokens import TokenRows, Tokens, matrix_of
from polyfed.models.model import Model
from polyfed.models.towers import Positioned, Positions
from polyfed.models.trunks import Padding
from polyfed.runs.loaded import LoadedClassifier, LoadedEncoder, LoadedModel, opened_apart
from polyfed.runs.opened import open_run

log = logging.getLogger(__name__)

TOLERANCE = 1e-5

Live = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Program:
    """A program on disk.

    Attributes:
        path: file of the program.
        shape: shape of the input; a name stands for a dimension that may vary.
        tokens: True if the input holds token ids (int64), else it is float32.
    """

    path: Path
    shape: tuple[str | int, ...]
    tokens: bool

    @property
    def fixed_length(self) -> int | None:
        return self.shape[1] if self.tokens and isinstance(self.shape[1], int) else None


class _Function(nn.Module):
    """A function of one tensor as a module that owns the modules it calls."""

    def __init__(self, function: Live, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(parts), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def write_program(function: Live, parts: Sequence[nn.Module], spec: InputSpec, path: Path, what: str) -> Program:
    """Trace a function, save it, load it again and compare both on the CPU, to ``TOLERANCE``.

    The program takes any batch size, and any length of token rows where the network can vary it (a network that is
    unrolled over the positions, such as a GRU, cannot).

    Args:
        function: maps one tensor to one tensor.
        parts: modules that it calls; in evaluation mode afterwards.
        spec: shape and vocabulary of the input.
        path: file to write.
        what: name of the network in messages.

    Raises:
        RunError: ``torch.export`` fails, or the program gives other values.
    """
    tokens = bool(spec.vocabulary)
    traced = _traced(_Function(function, parts).eval(), spec, what)
    with silent():
        torch.export.save(traced, path)
    program = Program(path, _shape(traced, tokens), tokens)
    error, shape = _largest_error(program, spec, function, loaded_program(path))
    if not error <= TOLERANCE:
        raise RunError(
            f"{what} cannot be exported: the program differs from the model by {error:.1e} on {shape}, more than "
            f"{TOLERANCE:.0e}; its forward pass must depend neither on padding nor on chance, or use another encoder"
        )
    return program


def example_input(spec: InputSpec, *, rows: int, length: int | None = None, seed: int = 0) -> Tensor:
    """Random encoder input [rows, ...]: token rows of falling length, the first full; or normal values."""
    stream = torch.Generator().manual_seed(seed)
    if not spec.vocabulary:
        return torch.randn(rows, *spec.shape, generator=stream)
    longest = length or spec.shape[0]
    ids = torch.randint(len(spec.vocabulary) - 1, (rows, longest), generator=stream)
    # the padding id is left out: networks take it for the end of a text
    ids += ids >= spec.pad  # padding stands at the end only
    used = (longest - torch.arange(rows) * longest // max(rows, 1)).unsqueeze(1)
    return ids.masked_fill(torch.arange(longest) >= used, spec.pad)


def _traced(module: nn.Module, spec: InputSpec, what: str) -> ExportedProgram:
    # the batch must vary; the length may, and is fixed where the network unrolls over it
    dims = {0: Dim.DYNAMIC} | ({1: Dim.AUTO} if spec.vocabulary else {})
    try:
        with silent(), torch.no_grad():
            return torch.export.export(module, (example_input(spec, rows=3),), dynamic_shapes=(dims,), strict=False)
    except Exception as error:  # a network of any kind may fail in any way
        reason = str(error).strip().split("\n")[0]
        raise RunError(
            f"{what} cannot be exported, torch.export reports: {reason}; give it a forward pass whose shapes and "
            "branches do not depend on the data, or use another encoder"
        ) from error


def _shape(traced: ExportedProgram, tokens: bool) -> tuple[str | int, ...]:
    name = traced.graph_signature.user_inputs[0]
    sizes = next(node.meta["val"].shape for node in traced.graph.nodes if node.name == name)
    names = ("batch", "length" if tokens else "")
    return tuple(int(size) if is_concrete_int(size) else names[min(k, 1)] for k, size in enumerate(sizes))


def _largest_error(program: Program, spec: InputSpec, expected: Live, run: Live) -> tuple[float, list[int]]:
    """Largest difference of a program from the live model, relative to the outputs, and the shape of its input."""
    half = max(1, spec.shape[0] // 2) if program.tokens else None
    errors = []
    # a batch of one, as torch would rather fix a size of 1; another batch; shorter texts
    for rows, length in ((1, None), (5, None), (4, half)):
        x = example_input(spec, rows=rows, length=length, seed=rows)
        with torch.no_grad():
            wanted, outputs = expected(x), run(padded(x, program.fixed_length, spec.pad))
        errors.append((float((outputs - wanted).abs().max() / wanted.abs().max().clamp(min=1)), list(x.shape)))
    return max(errors, key=lambda one: math.inf if math.isnan(one[0]) else one[0])


def loaded_program(path: Path) -> Live:
    with silent():
        module: Live = torch.export.load(path).module()
    return module


def padded(x: Tensor, length: int | None, pad: int) -> Tensor:
    """Token rows filled up to a length; unchanged without one."""
    return x if length is None else F.pad(x, (0, length - x.shape[1]), value=pad)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep torch's warnings, and the steps and failures that it prints, off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(StringIO()), contextlib.redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class RawEncoder(nn.Module):
    """An encoder of cached features behind the frozen network that computes them, in float32.

    Args:
        view: view that gives the features.
        backbone: the network.
        encoder: encoder of the features.
        spec: inputs as the network takes them.
    """

    def __init__(self, view: Features, backbone: Backbone, encoder: nn.Module, spec: InputSpec) -> None:
        super().__init__()
        self.view, self.backbone, self.encoder = view, backbone, encoder
        self.padding = Padding.for_texts(spec, backbone)
        # positions of texts are filled up to a length, on which the encoder may depend
        self.length = spec.shape[0] if spec.vocabulary and view.pool == "tokens" and not view.positions else None

    def features(self, x: Tensor) -> Tensor:
        """Features as the view gives them."""
        x, mask = (x, None) if self.padding is None else self.padding.of(x)
        features = self.view.averaged(self.backbone(x, mask), mask)
        return features if self.length is None else F.pad(features, (0, 0, 0, self.length - features.shape[1]))

    def forward(self, x: Tensor) -> Float[Tensor, "b d"]:
        embedding: Tensor = self.encoder(self.features(x))
        return embedding

    def positions(self, x: Tensor) -> Positions:
        return cast("Positioned", self.encoder).positions(self.features(x))


def on_raw_inputs(model: Model, views: Mapping[str, View], context: DataContext) -> dict[str, View]:
    """Put networks of cached features in front of the encoders of a model, which is changed.

    Returns:
        Modality -> view that gives what the encoder takes now.

    Raises:
        ConfigError: a network cannot be had.
    """
    raw = {}
    for modality, view in views.items():
        if not isinstance(view, Features):
            raw[modality] = view.resolved(modality, context)
            continue
        folder = locate(view.backbone, context.weights, key="view features, backbone", hub=context.hub)
        settings = {key: getattr(view, key) for key in ("backbone", "tower", "size", "fit", "length")}
        raw[modality] = own = Native(**settings).resolved(modality, context)
        backbone = cast("Backbone", channels_last(frozen_backbone(folder, view.pool, view.tower, view.left)))
        if view.precision != "fp32":
            log.warning("features of '%s' were computed in %s, the export's are in float32", modality, view.precision)
        model.encoders[modality] = RawEncoder(view, backbone, model.encoders[modality], own.spec(modality, context))
    return raw


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
        key, decided = "classes_program", {} if task["name"] == "segmentation" else entries
        logits = {name: _program(folder, entry, key) for name, entry in decided.items() if entry[key]}
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
    opener = _opener(folder, modality, view, entry["preparation"], DataContext(cache=folder, weights=weights_dir))
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
