"""The client half of the flower engine: a ClientApp that performs the requests of a message, client by client."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from polyfed import __version__
from polyfed.engines.engine import Hosting
from polyfed.engines.flower_records import from_records, to_records
from polyfed.engines.parcels import parcel_answer, request_of
from polyfed.engines.site import RunCard, Site
from polyfed.errors import PayloadError, PolyfedError
from polyfed.federation.cohort import Answer
from polyfed.federation.limits import Limits
from polyfed.federation.settings import SiteSettings
from polyfed.federation.wire import SCHEMA, Part

log = logging.getLogger(__name__)


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


Opener = Callable[[str, Any], Host]
"""From the run's card (JSON) and Flower's context to the host."""


def client_app(opener: Opener) -> Any:
    """The ClientApp of a node."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        return Message(_described(message.content, context, opener), reply_to=message)

    @app.train("step")
    def step(message: Message, context: Context) -> Message:
        return Message(_performed(message.content, context, opener), reply_to=message)

    return app


def _described(content: Any, context: Any, opener: Opener) -> Any:
    try:
        facts, _ = from_records(content)
        host = opener(str(facts["card"]), context)
    except Exception as error:
        log.exception("this site cannot take part")
        return to_records({"site": _named(context), "error": f"{type(error).__name__}: {error}"}, [])
    infos = [asdict(info) for info in host.site.infos if info.id in host.clients]
    return to_records({"site": host.name, "clients": infos}, [])


def _performed(content: Any, context: Any, opener: Opener) -> Any:
    try:
        facts, parts = from_records(content)
        asked: list[dict[str, Any]] = list(facts["requests"])  # type: ignore[call-overload]
    except (PayloadError, KeyError, TypeError) as error:
        return to_records({"error": f"damaged message: {error}"}, [])
    try:
        host = opener(str(facts["card"]), context)
    except Exception as error:
        log.exception("this site cannot take part")
        reason = f"{type(error).__name__}: {error}"
        return _replies([Answer(str(entry["client"]), error=reason) for entry in asked])
    return _replies([_one(host, entry, parts) for entry in asked])


def _one(host: Host, entry: dict[str, Any], parts: Sequence[Part]) -> Answer:
    client = str(entry.get("client"))
    try:
        own = [parts[place] for place in entry["places"]]
        request = request_of(entry["text"], own, host.site.limits)
        if request.client not in host.clients:
            raise PayloadError(f"client '{request.client}' does not live on this node")
    except (PolyfedError, KeyError, TypeError, IndexError) as error:
        log.error("client %s: %s", client, error)
        return Answer(client, error=f"{type(error).__name__}: {error}")
    answer = host.site.answer(request, tracebacks=host.tracebacks)
    if answer.error is not None:
        log.error("client %s failed in step %s: %s\n%s", client, request.step, answer.error, answer.details)
    return answer


def _replies(answers: Sequence[Answer]) -> Any:
    """All answers as one content; answers share nothing, so their parts follow each other."""
    entries: list[dict[str, object]] = []
    parts: list[Part] = []
    for answer in answers:
        text, own = parcel_answer(answer, checksums=True)
        entries.append({"client": answer.client, "text": text, "parts": [len(parts), len(parts) + len(own)]})
        parts += own
    return to_records({"answers": entries}, parts)


def _named(context: Any) -> str:
    return str(context.node_config.get("name", context.node_config.get("partition-id", "?")))


# ---- opening


def read_card(text: str) -> RunCard:
    """The run's card, of a server that speaks this site's language.

    Raises:
        PayloadError: another version of polyfed or of the message layout, or not a card.
    """
    try:
        content = json.loads(text)
        theirs = (str(content["polyfed"]), int(content["schema_version"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PayloadError(f"damaged message: the run's card: {error}") from error
    if theirs != (__version__, SCHEMA):
        raise PayloadError(
            f"the server runs polyfed {theirs[0]} (messages {theirs[1]}), this site {__version__} "
            f"(messages {SCHEMA}); install equal versions"
        )
    return RunCard.model_validate(content)


@dataclass(frozen=True)
class _Simulated:
    """Opens a share of a simulated run's clients; it travels to Flower's processes, so it holds text only."""

    settings: str
    limits: str
    states: str
    vocabulary: str
    clients: tuple[str, ...]

    def __call__(self, card: str, context: Any) -> Host:
        number, count = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        site = _open(self, card)
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
def _open(place: _Simulated, card: str) -> Site:
    settings = SiteSettings.model_validate_json(place.settings)
    torch.set_num_threads(settings.run.threads)
    return Site.open(
        settings,
        read_card(card),
        Path(place.states),
        vocabulary=Path(place.vocabulary),
        limits=Limits.model_validate_json(place.limits),
    )
