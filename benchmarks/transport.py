"""Forms of tensors on the wire: time to make and read them against a copy of the fp32 bytes, and size against fp32."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import harness
import torch
from torch import Tensor

from polyfed.wire.framing import wire_size
from polyfed.wire.payload import Payload, Representations, TensorBundle, Weights
from polyfed.wire.transport import Transport

FORMS: Mapping[str, Transport] = {
    "float16": Transport(dtype="float16"),
    "bfloat16": Transport(dtype="bfloat16"),
}


def representations(rows: int, dim: int) -> Payload:
    """Unit rows of one modality."""
    values = torch.nn.functional.normalize(torch.randn(rows, dim), dim=1)
    return Payload({"content": Representations({"image": values}, order="o" * 64)})


def weights(layers: int, width: int) -> Payload:
    """Of a stack of linear layers."""
    tensors = {f"blocks.{k}.weight": torch.randn(width, width) for k in range(layers)}
    return Payload({"content": Weights(tensors | {f"blocks.{k}.bias": torch.randn(width) for k in range(layers)})})


def copied(item: TensorBundle) -> dict[str, Tensor]:
    """The rival: every byte once."""
    return {name: value.clone() for name, value in item.items()}


def bench(name: str, payload: Payload, repeats: int) -> None:
    """One line a form."""
    content = payload.bundles["content"]
    works: dict[str, harness.Work] = {"copy": lambda: copied(content)}
    wires = {form: transport.encode(payload) for form, transport in FORMS.items()}
    for form, transport in FORMS.items():
        works[f"make {form}"] = lambda transport=transport: transport.encode(payload)  # type: ignore[misc]
        works[f"read {form}"] = lambda transport=transport, form=form: transport.decode(  # type: ignore[misc]
            wires[form]
        )
    times = harness.interleaved(works, repeats)
    for form, wire in wires.items():
        size = wire_size(wire) / wire_size(payload)
        harness.report(f"{name} as {form}: bytes", ratio=size, against="fp32")
        for what in ("make", "read"):
            ratio = times[f"{what} {form}"].cpu / times["copy"].cpu
            against = "a copy of the fp32 bytes, CPU time"
            harness.report(f"{name} as {form}: {what}", ratio=ratio, against=against)


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    repeats = 3 if arguments.quick else 11
    bench("representations 10,000 x 256", representations(10_000, 256), repeats)
    bench("7 million weights", weights(layers=12, width=768), repeats)


if __name__ == "__main__":
    main()
