"""Payloads, and what comes of them on the other side of a transport."""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.wire.framing import pack, unpack
from polyfed.wire.limits import Frame, Limits
from polyfed.wire.payload import Payload, Representations, TensorBundle, Weights
from polyfed.wire.transport import Transport

LIMITS = Limits()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(seed: int = 0) -> dict[str, Tensor]:
    """Weights of all sorts."""
    return {
        "conv": drawn(4, 3, 5, 5, seed=seed),
        "linear": drawn(40, 30, seed=seed + 1),
        "bias": drawn(40, seed=seed + 2),
        "steps": torch.tensor(7 + seed),
        "empty": torch.zeros(0, 3),
    }


def crossed(payload: Payload, *, checksums: bool = True) -> Payload:
    """The payload after its bytes went through another process."""
    messages, frames = pack({"it": payload}, checksums=checksums)
    copied = [Frame(frame.header, [memoryview(bytes(buffer)) for buffer in frame.buffers]) for frame in frames]
    return unpack(messages["it"], copied, LIMITS)


def bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def sample() -> Payload:
    """Fields of all sorts."""
    weights = Weights({"a.weight": torch.randn(3, 4), "a.count": torch.tensor(7), "empty": torch.zeros(0, 2)})
    reps = Representations({"image": torch.randn(5, 2), "text": torch.randn(5, 2)}, order="abc")
    return Payload({"n": 12, "weights": weights, "loss": 0.5, "reps": reps, "name": "größe", "ok": True})


def received(transport: Transport, payload: Payload) -> Payload:
    """Payload on the other side of a wire."""
    return transport.decode(crossed(transport.encode(payload)))


def of(payload: Payload, name: str = "weights") -> TensorBundle:
    return payload.bundles[name]


def weights(tensors: dict[str, Tensor]) -> Payload:
    return Payload({"weights": Weights(tensors), "n": 3})
