"""SuperLink's list of admitted nodes, through Flower's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyfed.deploy.connection import ServerAddress
from polyfed.deploy.files import ServerFolder
from polyfed.deploy.link import Link


def link_to(server: ServerFolder, address: ServerAddress) -> Link:
    """Flower's command line, pointed at the SuperLink of a server folder.

    Raises:
        RunError: the folder cannot be written to.
    """
    return Link(server.home, f"127.0.0.1:{address.superlink_port}", server.authority[0])


def register(link: Link, public_key: Path) -> int:
    """Admit a node key at the running SuperLink; Flower's id of the node.

    Raises:
        RunError: SuperLink refuses or does not answer.
    """
    return int(link.call("supernode", "register", str(public_key), "--name", public_key.stem)["node-id"])


def unregister(link: Link, node_id: int) -> None:
    """Expel a node: what it sends is refused from now on, and its key cannot be registered with this SuperLink again.

    Raises:
        RunError: SuperLink refuses or does not answer.
    """
    link.call("supernode", "unregister", str(node_id))


def nodes(link: Link) -> list[dict[str, Any]]:
    """Admitted nodes as SuperLink lists them, with ``node-id`` and ``status`` among the keys.

    Raises:
        RunError: SuperLink does not answer.
    """
    listed: list[dict[str, Any]] = link.call("supernode", "list").get("nodes", [])
    return [node for node in listed if node["status"] != "unregistered"]
