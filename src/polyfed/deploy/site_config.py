"""What a site of a real federation writes down about itself: ``site.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from polyfed.federation.settings import SiteSettings
from polyfed.runs.experiment import parse_settings, read_config
from polyfed.wire.limits import Limits


class SiteConfig(SiteSettings):
    """A site: its clients with their data, models and tasks, and what it lets in and out.

    Relative paths are relative to the file. A group of one client gives the client its name. Names of groups begin with
    the site's, so that nobody can describe another site's clients.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="name of the site in the federation")
    state_dir: Path = Field(default=Path("state"), description="folder of what the clients keep between rounds")
    algorithms: list[str] = Field(
        default_factory=list,
        description="methods that may run here, by the name in a configuration; empty: all that polyfed ships",
    )
    public_digest: str | None = Field(default=None, description="agreed digest of the public set; None: not compared")
    limits: Limits = Field(default_factory=Limits)
    tracebacks: bool = Field(
        default=True, description="whether the server is told the traceback of a failed step, or its message only"
    )

    @model_validator(mode="after")
    def _own_names(self) -> SiteConfig:
        for group in self.clients:
            if group != self.name and not group.startswith(f"{self.name}-"):
                raise ValueError(
                    f"clients.{group}: a group carries the name of its site; call it '{self.name}' or "
                    f"'{self.name}-{group}'"
                )
        return self

    @classmethod
    def load(cls, path: Path) -> SiteConfig:
        """Read a site file.

        Raises:
            ConfigError: not there, not YAML, or a key or value is wrong.
        """
        config: SiteConfig = parse_settings(cls, read_config(path))
        return config.model_copy(update=_rooted(config, path.resolve().parent))


def _rooted(config: SiteConfig, folder: Path) -> dict[str, Any]:
    data = {
        name: folder / value
        for name in ("dir", "weights_dir", "cache_dir")
        if (value := getattr(config.data, name)) is not None
    }
    return {"state_dir": folder / config.state_dir, "data": config.data.model_copy(update=data)}
