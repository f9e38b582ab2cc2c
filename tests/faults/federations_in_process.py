"""A deployed federation without processes: real site folders on a fake grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fake_grid import FakeGrid

from polyfed.deploy.host import open_host
from polyfed.deploy.init import create_federation
from polyfed.engines.flower import within
from polyfed.engines.flower_node import Node
from polyfed.experiment import Experiment
from polyfed.runner import Run, resume, run


@dataclass
class InProcess:
    """Folders of a federation, and the grid over which its nodes are reached.

    Attributes:
        folder: as ``polyfed deploy init`` makes it.
        grid: of one node a site.
        engine: settings of the engine that make waiting short.
    """

    folder: Path
    grid: FakeGrid
    engine: dict[str, Any]

    @classmethod
    def made(cls, folder: Path, config: Mapping[str, Any], **engine: Any) -> InProcess:
        create_federation(folder, Experiment.parse(config), ["localhost"])
        nodes = {}
        for number, name in enumerate(config["clients"]):
            nodes[101 + 7 * number] = (Node(open_host), {"config": str(folder / name / "site.yaml")})
        quick = {"poll": 0.001, "absence": 0.05, "join": 0.3}
        return cls(folder, FakeGrid(nodes), quick | engine)

    def node(self, site: str) -> int:
        """Id of a site's node."""
        return next(node for node, (_, config) in self.grid.nodes.items() if f"/{site}/" in config["config"])

    def states(self, site: str, client: str) -> Path:
        """Where a client keeps its states; there has been one run."""
        return next((self.folder / site / "state").glob("*/clients")) / client

    def edit(self, place: str, change: Mapping[str, Any]) -> None:
        """Change top-level settings of a site's or the server's file."""
        path = self.folder / place / ("experiment.yaml" if place == "server" else "site.yaml")
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | dict(change)))

    def run(self, out: Path, **run_settings: Any) -> Run:
        """``polyfed run`` of the server's experiment, without SuperLink."""
        content = yaml.safe_load((self.folder / "server" / "experiment.yaml").read_text())
        content["run"] |= run_settings | {"engine": content["run"]["engine"] | dict(self.engine)}
        with within(self.grid):
            return run(Experiment.parse(content), out)

    def resume(self, out: Path) -> Run:
        """``polyfed resume``, without SuperLink."""
        with within(self.grid):
            return resume(out)
