"""The ledger: every byte that crosses between server and clients, and the transport that says how it is encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field

from polyfed.federation.payload import Artefact, Payload, settled
from polyfed.federation.wire import identity, tensor_bytes, wire_size
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
        return self.narrower()(payload)

    def narrower(self) -> Callable[[Payload], Payload]:
        """``narrow`` for several payloads: what they share is narrowed once and stays shared."""
        return self._caster(torch.float32, _WIRE[self.dtype])

    def widen(self, payload: Payload) -> Payload:
        """The payload as the receiver sees it."""
        return self._caster(_WIRE[self.dtype], torch.float32)(payload)

    def _caster(self, old: torch.dtype, new: torch.dtype) -> Callable[[Payload], Payload]:
        known: dict[Any, tuple[Artefact, Artefact]] = {}  # with the original, whose tensors' ids must stay taken

        def cast(item: Artefact) -> Artefact:
            key = identity(item)
            if key not in known:
                tensors = {
                    name: settled(value.to(new) if value.dtype == old else value) for name, value in item.items()
                }
                same = all(value is item[name] for name, value in tensors.items())
                known[key] = item, item if same else type(item)(tensors=tensors, **item.attributes())
            return known[key][1]

        return lambda payload: Payload(
            {name: cast(item) if isinstance(item, Artefact) else item for name, item in payload.fields.items()}
        )


@dataclass
class Ledger:
    """Records of one round, one line an artefact; scalars and framing of a message share a line of kind ``framing``."""

    records: list[dict[str, Any]] = field(default_factory=list)

    def enter(self, round_number: int, client: str, direction: Direction, step: str, payload: Payload) -> None:
        """Record a message as encoded; the lines of a message add up to its exact size in bytes."""
        common = {"round": round_number, "client": client, "direction": direction, "step": step}
        data, known = 0, set()
        for name, item in payload.artefacts.items():
            size = tensor_bytes(item) if identity(item) not in known else 0  # one that is named twice crosses once
            known.add(identity(item))
            data += size
            dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in item.values()})
            line = {"artefact": name, "kind": item.kind, "dtype": "+".join(dtypes), "bytes": size}
            self.records.append(common | line)
        framing = {
            "artefact": "framing",
            "kind": "framing",
            "dtype": "",
            "bytes": wire_size(payload) - data,
        }
        self.records.append(common | framing)

    def total(self, direction: Direction) -> int:
        """Bytes that crossed in a direction."""
        return sum(line["bytes"] for line in self.records if line["direction"] == direction)
