"""Safetensors files as blocks, so that no second copy of their tensors is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1 << 22  # bytes


def tensor_blocks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Content of a safetensors file, byte for byte as ``safetensors.torch.save`` has it, in blocks of up to 4 MiB.

    Args:
        tensors: tensors by name, of any device and layout; they may share memory.
        metadata: texts that the header holds.
    """
    import safetensors.torch
    import torch

    # the library's own header of tensors without elements: it decides on their order and the names of their types
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    # a file with neither tensors nor metadata can be read only with None
    header = json.loads(safetensors.torch.save(empty, metadata=dict(metadata) if metadata else None)[8:])
    names, end = [name for name in header if name in tensors], 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        header[name] |= {"shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        for block in torch.split(tensors[name].detach().contiguous().view(-1).view(torch.uint8), _BLOCK):
            yield block.cpu().numpy()
