"""Identity of nodes: in a deployment, the site of the key that admitted the node, with which its claims must agree.

SuperLink ties every request of a node to the key that signed it, and the operator ties every key to the name of a site.
So the name of a site is that of its key, for the entire run; a node that claims another name, another site's clients,
or the seat of another node receives nothing, and is reported by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyfed.core.errors import PayloadError, RunError
from polyfed.core.files import write_atomically
from polyfed.core.untrusted import file_json
from polyfed.deploy.folders import fingerprint_of_pem
from polyfed.federation.client import ClientInfo

REFUSED = "site_refused"
"""Event of a node that is not what it claims to be, or not what it was."""

_FILE = "sites.json"
_UNKNOWN = "unknown node"


@dataclass
class Sites:
    """Identities of a simulation's nodes, which this process has started: their own claims.

    Attributes:
        grid: Flower's grid.
    """

    grid: Any

    def online(self) -> Sequence[int]:
        return list(self.grid.get_node_ids())

    def name(self, node: int) -> str:
        return f"node {node}"

    def speaker(self, node: int, claimed: object) -> str:
        """The site of a node that claims to be ``claimed``, or None if it cannot take part.

        Raises:
            PayloadError: the node belongs to another site.
        """
        return self.name(node) if claimed is None else str(claimed)

    def admit(self, node: int, infos: Sequence[ClientInfo]) -> None:
        """Admit the clients that a node describes as those of its site.

        Raises:
            PayloadError: they are not, or one is described twice.
        """
        ids = [info.id for info in infos]
        twice = next((client for client in ids if ids.count(client) > 1), None)
        if twice is not None:
            raise PayloadError(f"it describes client {_quoted(twice)} more than once")


@dataclass(frozen=True)
class _Joined:
    """A site as it joined a run: the fingerprint of its key, and its clients."""

    key: str
    clients: tuple[ClientInfo, ...]


@dataclass
class RegisteredSites(Sites):
    """The sites of a deployed run: each is one admitted key, and one node at a time.

    Attributes:
        grid: Grid of SuperLink, whose nodes have the names and keys of their admission.
        names: Sites that take part, in client order.
        refused: Receives each node that is refused: its site, ``site_refused``, and the reason.
        most: Most clients of each site; 1 for others.
        joined: Sites as they joined.
    """

    names: Sequence[str]
    refused: Callable[[str, str, str], None]
    most: Mapping[str, int] = field(default_factory=dict)
    joined: dict[str, _Joined] = field(default_factory=dict)
    _seats: dict[str, int] = field(default_factory=dict)  # site -> its node
    _keys: dict[int, tuple[str, str]] = field(default_factory=dict)  # node -> site, fingerprint
    _reported: set[tuple[str, str]] = field(default_factory=set)

    def online(self) -> Sequence[int]:
        """The connected nodes of the run's sites, one each; all others receive no request."""
        connected = {int(node.node_id): node for node in self.grid.get_nodes()}
        self._seats = {site: node for site, node in self._seats.items() if node in connected}
        return [number for number, node in connected.items() if self._is_seated(number, node)]

    def name(self, node: int) -> str:
        return self._keys[node][0]

    def speaker(self, node: int, claimed: object) -> str:
        """The site whose key the node has."""
        site, _ = self._keys[node]
        if claimed is None or claimed == site:
            return site
        raise self._refusal(node, f"it claims to be site {_quoted(str(claimed))}; its key was admitted as '{site}'")

    def admit(self, node: int, infos: Sequence[ClientInfo]) -> None:
        """Admit a site's clients: they carry its name, and are those of its first description if it joined before."""
        site, key = self._keys[node]
        before = self.joined.get(site)
        try:
            super().admit(node, infos)
            # the operator limits the clients of a site, as each has a part in medians and averages
            if before is None and len(infos) > self.most.get(site, 1):
                raise PayloadError(
                    f"it describes {len(infos)} clients, and may bring {self.most.get(site, 1)}; if it is to bring "
                    f"more, set run.engine.clients.{site} to {len(infos)}"
                )
            for info in infos:
                self._require_own(site, info.id)
                if before is not None and info.id not in {known.id for known in before.clients}:
                    raise PayloadError(f"it describes client {_quoted(info.id)}, which it did not join the run with")
        except PayloadError as error:
            raise self._refusal(node, str(error)) from error
        if before is None:
            self.joined[site] = _Joined(key, tuple(infos))

    # ---- what is refused

    def _is_seated(self, number: int, node: Any) -> bool:
        site, key = str(getattr(node, "name", "")), fingerprint_of_pem(bytes(getattr(node, "public_key", b"")))
        if not site or not key:
            self._report(_UNKNOWN, "SuperLink has no name or no key for it; admit sites with: polyfed deploy admit")
            return False
        self._keys[number] = site, key
        known = self.joined.get(site)
        if site not in self.names:
            self._report(site, f"it is connected and not among run.engine.sites; it is sent nothing (key {key})")
        elif self._seats.get(site, number) != number:
            self._report(site, f"it is connected by a second node, which is sent nothing (key {key})")
        elif known is not None and known.key != key:
            self._report(site, f"its key {key} is not {known.key}, with which it joined the run (see {_FILE})")
        else:
            self._seats[site] = number
            return True
        return False

    def _require_own(self, site: str, client: str) -> None:
        owners = [name for name in self.names if client == name or client.startswith(f"{name}-")]
        owner = max(owners, key=len, default=None)  # with sites 'a' and 'a-b', client 'a-b-1' belongs to the latter
        if owner != site:
            whose = f"carries the name of site '{owner}'" if owner else f"does not carry its name, as '{site}-1' does"
            raise PayloadError(f"it describes client {_quoted(client)}, which {whose}")

    def _refusal(self, node: int, reason: str) -> PayloadError:
        site, key = self._keys[node]
        self._report(site, f"{reason} (key {key})")
        return PayloadError(reason)

    def _report(self, site: str, reason: str) -> None:
        if (site, reason) not in self._reported:
            self._reported.add((site, reason))
            self.refused(site, REFUSED, reason)

    # ---- what lasts

    def remember(self, folder: Path) -> None:
        content = {site: asdict(joined) for site, joined in self.joined.items()}
        write_atomically(folder / _FILE, json.dumps(content, indent=1).encode())

    def recall(self, folder: Path) -> tuple[ClientInfo, ...]:
        """All clients that joined at an earlier start, in client order.

        Raises:
            RunError: the file is missing or damaged.
        """
        path = folder / _FILE
        try:
            self.joined = {
                site: _Joined(str(entry["key"]), tuple(ClientInfo.from_json(info) for info in entry["clients"]))
                for site, entry in file_json(path.read_bytes()).items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, PayloadError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"'{path}', the list of joined sites, cannot be read ({reason}); restore it") from error
        return tuple(info for site in self.names if site in self.joined for info in self.joined[site].clients)


def _quoted(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")
