"""The ClientApp of the flower engine: takes messages apart, and hands them to whoever serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyfed.core.errors import PayloadError
from polyfed.engines.flower_records import from_records, to_records
from polyfed.wire.frames import Frame

MessageFields = dict[str, object]
"""What a message says beside its frames: anything that JSON holds."""

Serve = Callable[[str, MessageFields, Sequence[Frame], Mapping[str, Any]], tuple[MessageFields, Sequence[Frame]]]
"""From a message's kind (describe or step), fields and frames, and the node's configuration, to the reply's."""


def client_app(serve: Serve) -> Any:
    """The ClientApp of a node."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        return Message(_served("describe", message.content, context, serve), reply_to=message)

    @app.train("step")
    def step(message: Message, context: Context) -> Message:
        return Message(_served("step", message.content, context, serve), reply_to=message)

    return app


def _served(kind: str, content: Any, context: Any, serve: Serve) -> Any:
    try:
        fields, frames = from_records(content)
    except PayloadError as error:
        return to_records({"error": str(error)}, [])
    return to_records(*serve(kind, fields, frames, dict(context.node_config)))
