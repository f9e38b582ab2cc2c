"""Programs as ONNX files, each compared with what it was made of by running it in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import torch

from polyfed.core.errors import RunError
from polyfed.core.extras import brought_by
from polyfed.data.view import InputSpec
from polyfed.export.programs import TOLERANCE, Program, compared_inputs, loaded_program, padded, silent


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
    _check(path, program, spec, what)
    return path


def _check(path: Path, program: Program, spec: InputSpec, what: str) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name, original = session.get_inputs()[0].name, loaded_program(program.path)
    for x in compared_inputs(program, spec):
        x = padded(x, program.fixed_length, spec.pad)
        with torch.no_grad():
            wanted = original(x)
        outputs = torch.from_numpy(session.run(None, {name: x.numpy()})[0])
        error = float((outputs - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        if not error <= TOLERANCE:
            raise RunError(
                f"{what} cannot be exported to ONNX: onnxruntime gives values that differ by {error:.1e} on "
                f"{list(x.shape)}, more than {TOLERANCE:.0e}; leave ONNX out, or use another encoder"
            )
