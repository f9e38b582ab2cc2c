"""State that clients keep between rounds: declared keys, durable after every step, bounded in memory.

A state is stored under the version (round, phase) of the step that made it, with the version of the one before it.
The server names the version from which a client goes on: that of the client's last step whose reply it accepted. A step
whose reply was lost, late or refused has therefore never happened, a round that was begun and lost is simply done
again, and a client that does not have what it is asked for (its disk was replaced, or the server was restored from an
old copy) raises an error instead of starting afresh in silence.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from enum import Enum
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically
from polyfed.core.tensor_files import tensor_blocks
from polyfed.wire.messages import StateVersion

Entry = dict[str, Tensor]

_NAME = re.compile(r"(\d{6,})-(\d{2,})\.safetensors")  # as many digits that names sort as versions do


class Lifetime(Enum):
    """Lifetime of a value that a client keeps: the run, or its round."""

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
    """States of many clients: one safetensors file per state, the most recently used also in memory.

    Args:
        folder: folder of the files, with one folder per client.
        memory: bytes of state held in memory at most (one state is always held).
        late: True if a reply may be accepted in a later round than it was asked for.
    """

    def __init__(self, folder: Path, memory: int = 1 << 30, *, late: bool = False) -> None:
        self.folder, self.memory, self.late = folder, memory, late
        self._held: OrderedDict[str, tuple[StateVersion, Entry]] = OrderedDict()
        self.held_bytes = 0

    def load(self, client: str, version: StateVersion | None) -> Entry:
        """State of a client after its step ``version``; empty for None, before its first.

        Raises:
            RunError: the state is missing or damaged.
        """
        if version is None:
            return {}
        held = self._held.get(client)
        if held is not None and held[0] == version:
            self._held.move_to_end(client)
            return held[1]
        entry = self._read(client, version)
        self._hold(client, version, entry)
        return entry

    def save(self, client: str, version: StateVersion, entry: Entry, after: StateVersion | None) -> None:
        """Make a state durable and drop those that no resume can ask for.

        Args:
            client: its id.
            version: version of the step that made the state.
            entry: named tensors of the state.
            after: version of the state that the step started from.
        """
        # a copy: the model whose tensors these are serves the next client
        entry = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in entry.items()}
        metadata = {"after": _text(after) if after else ""}
        write_atomically(self._path(client, version), tensor_blocks(entry, metadata))
        self._hold(client, version, entry)
        wanted = {version, *self._history(client, version[0], after)}
        for stale in set(self.versions(client)) - wanted:
            self._path(client, stale).unlink(missing_ok=True)  # another start of the run may have cleaned up too

    def versions(self, client: str) -> list[StateVersion]:
        """Labels of the client's stored states, oldest first; a file that is called otherwise is none of them."""
        names = (_NAME.fullmatch(path.name) for path in (self.folder / client).glob("*.safetensors"))
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def damaged(self, expected: Mapping[str, StateVersion]) -> str | None:
        for client, version in expected.items():
            try:
                with safetensors.safe_open(self._path(client, version), framework="pt") as opened:
                    opened.keys()
            except (OSError, safetensors.SafetensorError):
                return client
        return None

    def _history(self, client: str, newest: int, after: StateVersion | None) -> Iterator[StateVersion]:
        # a run resumes from one of its last two complete rounds; asked for round t, these are t-1 and t-2; with late
        # replies, what one of an older round left may be accepted since, and what was before it is asked for
        more = self.late
        while after is not None:
            yield after
            if after[0] <= newest - 2:
                if not more:
                    return
                more = False
            after = self._before(client, after)

    def _before(self, client: str, version: StateVersion) -> StateVersion | None:
        try:
            with safetensors.safe_open(self._path(client, version), framework="pt") as opened:
                text = (opened.metadata() or {}).get("after", "")
        except (OSError, safetensors.SafetensorError):
            return None
        if not text:
            return None
        number, phase = text.split("-")
        return int(number), int(phase)

    def _hold(self, client: str, version: StateVersion, entry: Entry) -> None:
        previous = self._held.pop(client, None)
        self.held_bytes += _size(entry) - (_size(previous[1]) if previous else 0)
        self._held[client] = (version, entry)
        # what is let go of here is read from its file when it is wanted again
        while self.held_bytes > self.memory and len(self._held) > 1:
            _, (_, dropped) = self._held.popitem(last=False)
            self.held_bytes -= _size(dropped)

    def _path(self, client: str, version: StateVersion) -> Path:
        return self.folder / client / f"{_text(version)}.safetensors"

    def _read(self, client: str, version: StateVersion) -> Entry:
        path = self._path(client, version)
        where = f"state of client '{client}' after round {version[0]}, phase {version[1]}"
        if not path.is_file():
            raise RunError(f"{where} is not here; {self._whereabouts(client, version)}")
        try:
            return safetensors.torch.load(path.read_bytes())
        except (OSError, safetensors.SafetensorError) as error:
            raise RunError(f"{where} is damaged: {path.name}: {error}; restore the file from a copy") from error

    def _whereabouts(self, client: str, wanted: StateVersion) -> str:
        versions = self.versions(client)
        if not versions:
            return "there is none of this run: it was lost, or the run is foreign to this folder; restore the folder"
        rounds = ", ".join(str(number) for number in dict.fromkeys(version[0] for version in versions))
        if versions[0] > wanted:
            return f"there are newer ones (rounds {rounds}): the server is stale, restored from an old copy of its run"
        return f"there are others (rounds {rounds}); restore the folder from a copy"


def _text(version: StateVersion) -> str:
    return f"{version[0]:06d}-{version[1]:02d}"


def _size(entry: Entry) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in entry.values())


def flatten(values: Mapping[str, Mapping[str, Tensor]], separator: str = "/") -> Entry:
    """Named groups of named tensors as one flat mapping ``group/name`` (empty groups are dropped)."""
    return {f"{group}{separator}{name}": tensor for group, own in values.items() for name, tensor in own.items()}


def unflatten(entry: Mapping[str, Tensor], separator: str = "/") -> dict[str, dict[str, Tensor]]:
    """The inverse of ``flatten``."""
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in entry.items():
        group, _, name = key.partition(separator)
        groups.setdefault(group, {})[name] = tensor
    return groups
