"""Forms of tensors on the wire: time to make and to read them against a copy of the fp32 bytes, and size against fp32.

Limits: int8 representations of 256 numbers are at most 1 / 3.9 of fp32, framing included; making them takes at most
8 x the time of a copy, reading them 4 x.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import harness
import torch
from torch import Tensor

from polyfed.wire.framing import wire_size
from polyfed.wire.payload import Payload, Representations, TensorBundle, Weights
from polyfed.wire.transport import Transport

ROWS: Mapping[str, Transport] = {
    "float16": Transport(dtype="float16"),
    "bfloat16": Transport(dtype="bfloat16"),
    "int8": Transport(dtype="int8"),
}
UPDATES: Mapping[str, Transport] = {
    "int8": Transport(dtype="int8"),
    "top_10_percent": Transport(topk=0.1),
    "top_1_percent": Transport(topk=0.01),
    "top_1_percent_int8": Transport(topk=0.01, dtype="int8"),
    "unchanged": Transport(unchanged="omit"),
}
LIMITS = {"int8": {"bytes": 1 / 3.9, "make": 8.0, "read": 4.0}}


def representations(rows: int, dim: int) -> Payload:
    """Unit rows of one modality."""
    values = torch.nn.functional.normalize(torch.randn(rows, dim), dim=1)
    return Payload({"content": Representations({"image": values}, order="o" * 64)})


def update(layers: int, width: int, frozen: int) -> tuple[Payload, Payload]:
    """Weights as received, and as trained; ``frozen`` layers have not moved."""
    before = {f"blocks.{k}.weight": torch.randn(width, width) for k in range(layers)}
    before |= {f"blocks.{k}.bias": torch.randn(width) for k in range(layers)}
    still = tuple(f"blocks.{k}." for k in range(frozen))
    after = {
        name: value.clone() if name.startswith(still) else value + 0.01 * torch.randn_like(value)
        for name, value in before.items()
    }
    return Payload({"content": Weights(before)}), Payload({"content": Weights(after)})


def copied(item: TensorBundle) -> dict[str, Tensor]:
    """The rival: every byte once."""
    return {name: value.clone() for name, value in item.items()}


def bench(name: str, payload: Payload, received: Payload | None, forms: Mapping[str, Transport], repeats: int) -> None:
    """One line a form."""
    content = payload.bundles["content"]
    works: dict[str, harness.Work] = {"copy": lambda: copied(content)}
    wires = {form: transport.encode(payload, received) for form, transport in forms.items()}
    for form, transport in forms.items():
        works[f"make {form}"] = lambda transport=transport: transport.encode(payload, received)  # type: ignore[misc]
        works[f"read {form}"] = lambda transport=transport, form=form: transport.decode(  # type: ignore[misc]
            wires[form], received
        )
    times = harness.interleaved(works, repeats)
    for form, wire in wires.items():
        limits = LIMITS.get(form, {}) if received is None else {}
        size = wire_size(wire) / wire_size(payload)
        harness.report(f"{name} as {form}: bytes", ratio=size, against="fp32", limit=limits.get("bytes"))
        for what in ("make", "read"):
            ratio = times[f"{what} {form}"].cpu / times["copy"].cpu
            against = "a copy of the fp32 bytes, CPU time"
            harness.report(f"{name} as {form}: {what}", ratio=ratio, against=against, limit=limits.get(what))


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    repeats = 3 if arguments.quick else 11
    bench("representations", representations(10_000, 256), None, ROWS, repeats)
    before, after = update(layers=12, width=768, frozen=6)
    bench("weights", after, before, UPDATES, repeats)


if __name__ == "__main__":
    main()
