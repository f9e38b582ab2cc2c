"""The client half of the flower engine: performs the requests of a message, client by client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from polyfed.core.errors import PayloadError, PolyfedError
from polyfed.core.untrusted import read_json
from polyfed.core.version import __version__
from polyfed.engines.engine import Hosting
from polyfed.engines.flower_client import MessageFields
from polyfed.engines.site import RunSpec, Site
from polyfed.federation.settings import SiteSettings
from polyfed.wire.envelopes import envelope_answer, request_of
from polyfed.wire.frames import Frame
from polyfed.wire.framing import SCHEMA
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """A place on a node: its site, and which of the site's clients are this node's.

    Attributes:
        name: of the site.
        site: where clients live.
        clients: ids of those that live on this node.
        tracebacks: whether the server is told where a step failed.
    """

    name: str
    site: Site
    clients: Sequence[str]
    tracebacks: bool = True


Opener = Callable[[str, Mapping[str, Any]], Host]
"""From the run's spec (JSON) and the node's configuration to the host."""


@dataclass(frozen=True)
class Node:
    """Serves the messages of a node; see ``flower_client.Serve``."""

    opener: Opener

    def __call__(
        self, kind: str, fields: MessageFields, frames: Sequence[Frame], config: Mapping[str, Any]
    ) -> tuple[MessageFields, Sequence[Frame]]:
        """Describe the node's clients, or perform their requests."""
        if kind == "describe":
            return self._describe(fields, config), []
        return self._perform(fields, frames, config)

    def _describe(self, fields: MessageFields, config: Mapping[str, Any]) -> MessageFields:
        try:
            host = self.opener(str(fields["spec"]), config)
        except Exception as error:
            _log.exception("this site cannot take part")
            return {"site": site_name(config), "error": f"{type(error).__name__}: {error}"}
        infos = [asdict(info) for info in host.site.infos if info.id in host.clients]
        return {"site": host.name, "clients": infos}

    def _perform(
        self, fields: MessageFields, frames: Sequence[Frame], config: Mapping[str, Any]
    ) -> tuple[MessageFields, Sequence[Frame]]:
        try:
            asked: list[dict[str, Any]] = list(fields["requests"])  # type: ignore[call-overload]
            spec, checked = str(fields["spec"]), bool(fields.get("checked", True))
        except (KeyError, TypeError) as error:
            return {"error": f"damaged message: {error}"}, []
        try:
            host = self.opener(spec, config)
        except Exception as error:
            _log.exception("this site cannot take part")
            reason = f"{type(error).__name__}: {error}"
            return _replies([Answer(str(entry.get("client")), error=reason) for entry in asked])
        return _replies([_one(host, entry, frames) for entry in asked], checksums=checked)


def _one(host: Host, entry: dict[str, Any], frames: Sequence[Frame]) -> Answer:
    client = str(entry.get("client"))
    try:
        own = [frames[place] for place in entry["places"]]
        request = request_of(entry["text"], own, host.site.limits)
        if request.client not in host.clients:
            raise PayloadError(f"client '{request.client}' does not live on this node")
    except (PolyfedError, KeyError, TypeError, IndexError) as error:
        _log.error("client %s: %s", client, error)
        return Answer(client, error=f"{type(error).__name__}: {error}")
    answer = host.site.answer(request, tracebacks=host.tracebacks)
    if answer.error is not None:
        _log.error("client %s failed in step %s: %s\n%s", client, request.step, answer.error, answer.details)
    return answer


def _replies(answers: Sequence[Answer], *, checksums: bool = False) -> tuple[MessageFields, Sequence[Frame]]:
    """All answers as one reply; answers share nothing, so their frames follow each other."""
    entries: list[dict[str, object]] = []
    frames: list[Frame] = []
    for answer in answers:
        text, own = envelope_answer(answer, checksums=checksums)
        entries.append({"client": answer.client, "text": text, "parts": [len(frames), len(frames) + len(own)]})
        frames += own
    return {"answers": entries}, frames


def site_name(config: Mapping[str, Any]) -> str:
    """What a node is called whose site cannot be opened."""
    path = config.get("config")
    return Path(path).resolve().parent.name if isinstance(path, str) else f"node-{config.get('partition-id', '?')}"


# ---- opening


def read_spec(text: str) -> RunSpec:
    """The run's spec, of a server that speaks this site's language.

    Raises:
        PayloadError: another version of polyfed or of the message layout, or not a spec.
    """
    try:
        content: Any = read_json(text)
        theirs = (str(content["polyfed"]), int(content["schema_version"]))
    except (PayloadError, ValueError, KeyError, TypeError) as error:
        raise PayloadError(f"damaged message: the run's spec: {error}") from error
    if theirs != (__version__, SCHEMA):
        raise PayloadError(
            f"the server runs polyfed {theirs[0]} (messages {theirs[1]}), this site {__version__} "
            f"(messages {SCHEMA}); install equal versions"
        )
    try:
        return RunSpec.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(key) for key in problem["loc"])
        raise PayloadError(f"damaged message: the run's spec: {where}: {problem['msg']}") from error


@dataclass(frozen=True)
class _Simulated:
    """Opens a share of a simulated run's clients; it travels to Flower's processes, so it holds text only."""

    settings: str
    limits: str
    states: str
    vocabulary: str
    clients: tuple[str, ...]

    def __call__(self, spec: str, config: Mapping[str, Any]) -> Host:
        number, count = int(config["partition-id"]), int(config["num-partitions"])
        site = _open(self, spec)
        return Host(f"node-{number}", site, self.clients[number::count])


def simulated(hosting: Hosting) -> Opener:
    """Nodes of a simulation: the clients are dealt to them in turn."""
    return _Simulated(
        hosting.settings.model_dump_json(),
        hosting.limits.model_dump_json(),
        str(hosting.states),
        str(hosting.vocabulary),
        tuple(info.id for info in hosting.federation.infos),
    )


@lru_cache(maxsize=1)  # a process serves one run, message after message
def _open(place: _Simulated, spec: str) -> Site:
    settings = SiteSettings.model_validate_json(place.settings)
    torch.set_num_threads(settings.run.threads)
    return Site.open(
        settings,
        read_spec(spec),
        Path(place.states),
        vocabulary=Path(place.vocabulary),
        limits=Limits.model_validate_json(place.limits),
    )
