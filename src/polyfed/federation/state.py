"""What clients keep between rounds: declared keys, durable after every step, bounded in memory.

A state is stored under the (round, phase) in which it was made. A client that is asked for round t starts from its
newest state of an earlier round, so a round that was begun and lost is simply done again, on every engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from enum import Enum
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from polyfed.errors import RunError
from polyfed.federation.files import write_atomically

Entry = dict[str, Tensor]
Label = tuple[int, int]


class Lifetime(Enum):
    """How long a client keeps a value: for the whole run, or until its round ends."""

    RUN = "run"
    ROUND = "round"


class ClientState(MutableMapping[str, Mapping[str, Tensor]]):
    """A client's kept values: declared key -> named tensors."""

    def __init__(self, declared: Mapping[str, Lifetime], values: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._declared = declared
        self._values = dict(values)

    def __getitem__(self, key: str) -> Mapping[str, Tensor]:
        return self._values[self._require(key)]

    def __setitem__(self, key: str, value: Mapping[str, Tensor]) -> None:
        self._values[self._require(key)] = value

    def __delitem__(self, key: str) -> None:
        del self._values[self._require(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _require(self, key: str) -> str:
        if key not in self._declared:
            raise KeyError(f"'{key}' is not among what this algorithm keeps on a client: {sorted(self._declared)}")
        return key


class StateStore:
    """States of many clients: one safetensors file a state, the most recently used also in memory.

    Args:
        folder: where the files live; one folder a client.
        memory: bytes of state held in memory at most (one state is always held).
    """

    def __init__(self, folder: Path, memory: int = 1 << 30) -> None:
        self.folder = folder
        self.memory = memory
        self._held: OrderedDict[str, tuple[Label, Entry]] = OrderedDict()
        self._bytes = 0

    def load(self, client: str, before: Label) -> tuple[Label, Entry] | None:
        """The client's newest state older than ``before``, or None; newer ones are of a lost round and ignored.

        Raises:
            RunError: the state file is damaged.
        """
        labels = [label for label in self.labels(client) if label < before]
        if not labels:
            return None
        held = self._held.get(client)
        if held is not None and held[0] == labels[-1]:
            self._held.move_to_end(client)
            return held
        entry = self._read(client, labels[-1])
        self._hold(client, labels[-1], entry)
        return labels[-1], entry

    def save(self, client: str, label: Label, entry: Entry) -> None:
        """Make a state durable and drop those that no resume can ask for."""
        entry = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in entry.items()}
        write_atomically(self._path(client, label), safetensors.torch.save(entry))
        self._hold(client, label, entry)
        for stale in self._stale(client, label):
            self._path(client, stale).unlink(missing_ok=True)

    def labels(self, client: str) -> list[Label]:
        """Labels of the client's stored states, oldest first."""
        names = (path.stem.split("-") for path in (self.folder / client).glob("*.safetensors"))
        return sorted((int(a), int(b)) for a, b in names)

    def damaged(self, before_round: int) -> str | None:
        """Name of a client whose newest state of a round before ``before_round`` cannot be read, or None."""
        for folder in sorted(self.folder.glob("*")):
            labels = [label for label in self.labels(folder.name) if label < (before_round, 0)]
            if labels and not _readable(self._path(folder.name, labels[-1])):
                return folder.name
        return None

    def forget(self, from_round: int) -> None:
        """Delete all states of round ``from_round`` and later: they belong to rounds that are done again."""
        self._held.clear()
        self._bytes = 0
        for folder in self.folder.glob("*"):
            for label in self.labels(folder.name):
                if label >= (from_round, 0):
                    self._path(folder.name, label).unlink(missing_ok=True)

    def _stale(self, client: str, newest: Label) -> list[Label]:
        # a run resumes from one of its last two complete rounds, so one state older than both is kept
        return [label for label in self.labels(client) if label[0] < newest[0] - 1][:-1]

    def _hold(self, client: str, label: Label, entry: Entry) -> None:
        previous = self._held.pop(client, None)
        self._bytes += _size(entry) - (_size(previous[1]) if previous else 0)
        self._held[client] = (label, entry)
        while self._bytes > self.memory and len(self._held) > 1:
            _, (_, dropped) = self._held.popitem(last=False)
            self._bytes -= _size(dropped)

    def _path(self, client: str, label: Label) -> Path:
        return self.folder / client / f"{label[0]:06d}-{label[1]:02d}.safetensors"

    def _read(self, client: str, label: Label) -> Entry:
        path = self._path(client, label)
        try:
            return safetensors.torch.load(path.read_bytes())
        except (OSError, safetensors.SafetensorError) as error:
            raise RunError(f"state of client '{client}' is damaged: {path.name}: {error}; resume the run") from error


def _size(entry: Entry) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in entry.values())


def _readable(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            opened.keys()
    except (OSError, safetensors.SafetensorError):
        return False
    return True


def flatten(values: Mapping[str, Mapping[str, Tensor]]) -> Entry:
    """Named groups of named tensors as one flat mapping ``group/name`` (empty groups are dropped)."""
    return {f"{group}/{name}": tensor for group, tensors in values.items() for name, tensor in tensors.items()}


def unflatten(entry: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of ``flatten``."""
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in entry.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups
