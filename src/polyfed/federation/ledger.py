"""The ledger: every byte that crosses between server and clients, and the transport that says how it is encoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.federation.payload import Artefact, Payload, encoded_size, tensor_bytes
from polyfed.settings import Settings

Direction = Literal["down", "up"]
_WIRE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Transport(Settings):
    """How tensors are encoded on the wire; an option of the payload layer, not of a method."""

    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="type in which fp32 tensors cross; the receiver gets fp32 back"
    )

    def narrow(self, payload: Payload) -> Payload:
        """The payload as it crosses the wire."""
        return self._cast(payload, torch.float32, _WIRE[self.dtype])

    def widen(self, payload: Payload) -> Payload:
        """The payload as the receiver sees it."""
        return self._cast(payload, _WIRE[self.dtype], torch.float32)

    def _cast(self, payload: Payload, old: torch.dtype, new: torch.dtype) -> Payload:
        if self.dtype == "float32":
            return payload

        def cast(value: Tensor) -> Tensor:
            return value.to(new) if value.dtype == old else value

        return Payload(
            {
                name: type(item)(tensors={key: cast(value) for key, value in item.items()}, **item.attributes())
                if isinstance(item, Artefact)
                else item
                for name, item in payload.fields.items()
            }
        )


@dataclass
class Ledger:
    """Records of one round, one line an artefact; scalars and framing of a message share a line of kind ``framing``."""

    records: list[dict[str, Any]] = field(default_factory=list)

    def enter(self, round_number: int, client: str, direction: Direction, step: str, payload: Payload) -> None:
        """Record a message as encoded; the lines of a message add up to its exact size in bytes."""
        common = {"round": round_number, "client": client, "direction": direction, "step": step}
        data = 0
        for name, item in payload.artefacts.items():
            size = tensor_bytes(item)
            data += size
            dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in item.values()})
            line = {"artefact": name, "kind": item.kind, "dtype": "+".join(dtypes), "bytes": size}
            self.records.append(common | line)
        framing = {
            "artefact": "framing",
            "kind": "framing",
            "dtype": "",
            "bytes": encoded_size(payload) - data,
        }
        self.records.append(common | framing)
