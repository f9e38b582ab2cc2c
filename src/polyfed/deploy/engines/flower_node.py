"""The client half of the flower engine: performs the requests of a message, client by client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from polyfed.core.errors import PayloadError, PolyfedError, RefusedError
from polyfed.core.untrusted import read_json
from polyfed.core.version import __version__
from polyfed.engines.engine import Hosting, PortableSite
from polyfed.engines.outgoing import failure_of
from polyfed.engines.run_spec import RunSpec
from polyfed.engines.site import Site
from polyfed.wire.limits import Frame
from polyfed.wire.messages import Answer, Cause, envelope_answer, request_of

if TYPE_CHECKING:  # the module imports Flower, which a site's worker does not need
    from polyfed.deploy.engines.flower_records import MessageFields

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """A site on a node, with the clients that live on this node.

    Attributes:
        name: Name of the site.
        site: Site of the clients.
        clients: Ids of the clients on this node.
        tracebacks: True to send message and traceback of a failed step; else the class of error and a number.
    """

    name: str
    site: Site
    clients: Sequence[str]
    tracebacks: bool = False


Opener = Callable[[str, Mapping[str, Any]], Host]
"""Opens the host from the run's spec (JSON) and the node's configuration."""


@dataclass(frozen=True)
class Node:
    """Serves the messages of a node; see ``flower_records.Serve``.

    Attributes:
        opener: Opens the site of this node.
        simulated: True if the server may see why the site cannot be opened, as the data are its own.
    """

    opener: Opener
    simulated: bool = False

    def __call__(
        self, action: str, fields: MessageFields, frames: Sequence[Frame], config: Mapping[str, Any]
    ) -> tuple[MessageFields, Sequence[Frame]]:
        """Describe the node's clients, or perform their requests."""
        if action == "describe":
            return self._describe(fields, config), []
        try:
            entries: list[dict[str, Any]] = list(fields["requests"])  # type: ignore[call-overload]
            spec, checked = str(fields["spec"]), bool(fields.get("checked", True))
        except (KeyError, TypeError) as error:
            return {"error": f"damaged message: {error}"}, []
        used = {place for entry in entries for place in entry.get("places") or () if isinstance(place, int)}
        if unused := {*range(len(frames))} - used:
            return {"error": f"damaged message: no request refers to frame {min(unused)} of its {len(frames)}"}, []
        try:
            host = self.opener(spec, config)
        except Exception as error:
            _log.exception("this site cannot take part")
            failure = failure_of(error, in_full=self.simulated)
            return _replies([Answer(str(entry.get("client")), failure=failure) for entry in entries])
        return _replies([_performed(host, entry, frames) for entry in entries], checksums=checked)

    def _describe(self, fields: MessageFields, config: Mapping[str, Any]) -> MessageFields:
        try:
            host = self.opener(str(fields["spec"]), config)
            infos = [asdict(info) for info in host.site.infos if info.id in host.clients]
        except Exception as error:
            _log.exception("this site cannot take part")
            return {"error": failure_of(error, in_full=self.simulated).text}  # its key identifies the site
        return {"site": host.name, "clients": infos}


def _performed(host: Host, entry: dict[str, Any], frames: Sequence[Frame]) -> Answer:
    client = str(entry.get("client"))
    try:
        request = request_of(entry["text"], [frames[place] for place in entry["places"]], host.site.limits)
        if request.client not in host.clients:
            raise PayloadError(f"client '{request.client}' does not live on this node")
    except (PolyfedError, KeyError, TypeError, IndexError) as error:
        _log.error("client %s: %s", client, error)
        text = f"{type(error).__name__}: {error}"  # depends only on the server's message
        return Answer.failed(client, Cause.REFUSED, text)
    answer = host.site.answer(request, tracebacks=host.tracebacks)
    if (failure := answer.failure) is not None:
        _log.error("client %s failed in step %s: %s\n%s", client, request.step, failure.text, failure.details)
    return answer


def _replies(answers: Sequence[Answer], *, checksums: bool = False) -> tuple[MessageFields, Sequence[Frame]]:
    """All answers as one reply, with their frames in sequence, as they share none."""
    entries: list[dict[str, object]] = []
    frames: list[Frame] = []
    for answer in answers:
        text, own = envelope_answer(answer, checksums=checksums)
        entries.append({"client": answer.client, "text": text, "parts": [len(frames), len(frames) + len(own)]})
        frames += own
    return {"answers": entries}, frames


def read_spec(text: str) -> RunSpec:
    """The run's spec, from a server of this site's version.

    Raises:
        RefusedError: the server has another version of polyfed, or the text is not a spec.
    """
    try:
        content: Any = read_json(text)
        theirs = str(content["polyfed"])
    except (PayloadError, KeyError, TypeError) as error:
        raise RefusedError(f"damaged message: the run's spec: {error}") from error
    if theirs != __version__:
        raise RefusedError(f"the server runs polyfed {theirs}, this site {__version__}; install equal versions")
    try:
        return RunSpec.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(key) for key in problem["loc"])
        raise RefusedError(f"damaged message: the run's spec: {where}: {problem['msg']}") from error


@dataclass(frozen=True)
class _Simulated:
    """Opens a part of a simulated run's clients; sent to Flower's processes."""

    portable: PortableSite
    clients: tuple[str, ...]

    def __call__(self, spec: str, config: Mapping[str, Any]) -> Host:
        number, count = int(config["partition-id"]), int(config["num-partitions"])
        return Host(f"node-{number}", _opened(self.portable, spec), self.clients[number::count], tracebacks=True)


def simulated(hosting: Hosting) -> Opener:
    return _Simulated(hosting.portable, tuple(info.id for info in hosting.federation.infos))


@lru_cache(maxsize=1)  # a process serves one run, message after message
def _opened(portable: PortableSite, spec: str) -> Site:
    return portable.open(read_spec(spec))
