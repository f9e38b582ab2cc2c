"""Programs: networks saved with ``torch.export`` or as ONNX, loaded again, and compared with the live ones."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.nn import functional as F

from polyfed.core.errors import RunError
from polyfed.core.extras import brought_by
from polyfed.data.view import InputSpec

TOLERANCE = 1e-5

Live = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Program:
    """A program on disk.

    Attributes:
        path: its file.
        shape: of its input; a name stands for a dimension that may vary.
        tokens: whether the input are token ids (int64), else float32.
    """

    path: Path
    shape: tuple[str | int, ...]
    tokens: bool

    @property
    def fixed_length(self) -> int | None:
        return self.shape[1] if self.tokens and isinstance(self.shape[1], int) else None


def write_program(module: nn.Module, live: Live, spec: InputSpec, path: Path, what: str) -> Program:
    """Trace a network, save it, load it again and compare it with ``live``.

    The program takes any batch size, and any length of token rows where the network can vary it (one that is
    unrolled over the positions, such as a GRU, cannot).

    Args:
        module: one tensor in, one out; in evaluation mode afterwards.
        live: what the program must agree with, to ``TOLERANCE``, on the CPU.
        spec: of its input.
        path: file to write.
        what: its name in messages.

    Raises:
        RunError: ``torch.export`` cannot handle it, or the program differs.
    """
    tokens = bool(spec.vocabulary)
    traced = _traced(module.eval(), spec, what)
    with silent():
        torch.export.save(traced, path)
    program = Program(path, _shape(traced, tokens), tokens)
    error, shape = _largest_error(program, spec, live, loaded_program(path))
    if not error <= TOLERANCE:
        raise RunError(
            f"{what} cannot be exported: the program differs from the model by {error:.1e} on {shape}, more than "
            f"{TOLERANCE:.0e}; give it a forward pass that depends neither on padding nor on chance, or use another "
            "encoder"
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
    example = example_input(spec, rows=3)
    try:
        with silent(), torch.no_grad():
            return torch.export.export(module, (example,), dynamic_shapes=(dims,), strict=False)
    except Exception as error:  # a network of any kind may fail in any way
        reason = str(error).strip().split("\n")[0]
        raise RunError(
            f"{what} cannot be exported, torch.export says: {reason}; give it a forward pass whose shapes "
            "and branches do not depend on the data, or use another encoder"
        ) from error


def _shape(traced: ExportedProgram, tokens: bool) -> tuple[str | int, ...]:
    name = traced.graph_signature.user_inputs[0]
    node = next(node for node in traced.graph.nodes if node.name == name)
    names = ("batch", "length" if tokens else "")
    return tuple(
        int(size) if is_concrete_int(size) else names[min(place, 1)]
        for place, size in enumerate(node.meta["val"].shape)
    )


def _largest_error(program: Program, spec: InputSpec, expected: Live, run: Live) -> tuple[float, list[int]]:
    """How far a program is from what it must agree with, relative to its outputs, and for which input."""
    half = max(1, spec.shape[0] // 2) if program.tokens else None
    errors = []
    # a batch of one, as torch would rather fix a size of 1; another batch; shorter texts
    for rows, length in ((1, None), (5, None), (4, half)):
        x = example_input(spec, rows=rows, length=length, seed=rows)
        with torch.no_grad():
            wanted, outputs = expected(x), run(padded(x, program.fixed_length, spec.pad))
        error = float((outputs - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        errors.append((error, list(x.shape)))
    return max(errors, key=lambda one: math.inf if math.isnan(one[0]) else one[0])


def loaded_program(path: Path) -> Live:
    with silent():
        module: Live = torch.export.load(path).module()
    return module


def padded(x: Tensor, length: int | None, pad: int) -> Tensor:
    """Token rows filled up to a length; as they are without one."""
    return x if length is None else F.pad(x, (0, length - x.shape[1]), value=pad)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep torch's warnings, and what it prints of its steps and failures, off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(StringIO()), contextlib.redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ---- ONNX


def require_onnx() -> None:
    """Raise ConfigError if the packages of the extra ``onnx`` are not there."""
    with brought_by("onnx"):
        import onnx
        import onnxruntime
        import onnxscript
    _ = onnx, onnxruntime, onnxscript


def write_onnx(program: Program, spec: InputSpec, what: str) -> Path:
    """Write ``<modality>.onnx`` beside a program: one input, one output, any batch size.

    Args:
        program: its file is what is converted.
        spec: of its input.
        what: its name in messages.

    Returns:
        The file.

    Raises:
        RunError: it cannot be converted, or gives other values in onnxruntime.
    """
    import onnxruntime

    path = program.path.with_suffix(".onnx")
    try:
        with silent(), torch.no_grad():
            lowered = torch.export.load(program.path).run_decompositions({})
            # weights in the file itself: one file a modality, like the program
            torch.onnx.export(
                lowered, f=path, dynamo=True, external_data=False, input_names=["input"], output_names=["output"]
            )
    except Exception as error:  # a converter may fail in any way
        reason = str(error).strip().split("\n")[0]
        raise RunError(
            f"{what} cannot be exported to ONNX: {type(error).__name__}: {reason}; leave ONNX out, or use another "
            "encoder"
        ) from error
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name, original = session.get_inputs()[0].name, loaded_program(program.path)
    difference, shape = _largest_error(
        program,
        spec,
        lambda x: original(padded(x, program.fixed_length, spec.pad)),
        lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]),
    )
    if not difference <= TOLERANCE:
        raise RunError(
            f"{what} cannot be exported to ONNX: onnxruntime gives values that differ by {difference:.1e} on {shape}, "
            f"more than {TOLERANCE:.0e}; leave ONNX out, or use another encoder"
        )
    return path
