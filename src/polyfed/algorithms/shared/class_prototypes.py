"""Global class prototypes at a server, and checks of what clients send of them."""

from __future__ import annotations

from collections.abc import Callable

from polyfed.aggregation.prototypes import ClassMeans, GlobalPrototypes, by_space
from polyfed.algorithms.algorithm import Client, ClientInfo, Reply, Server
from polyfed.core.errors import PayloadError
from polyfed.models.heads import class_count

PROTOTYPES = "prototypes"
"""What of the server's state they are."""


class PrototypeCheck:
    """Raises PayloadError for a reply whose prototypes cannot be what its sender has.

    The first prototypes of a space that are accepted fix its number of classes and width.

    Args:
        admits: whether a class space can be that of a client.
        server: with the global prototypes so far.
    """

    def __init__(self, admits: Callable[[ClientInfo, str], bool], server: Server) -> None:
        self._admits = admits
        self._shapes = {space: prototypes.shape for space, prototypes in global_prototypes(server).items()}

    def __call__(self, reply: Reply) -> None:
        """Check a reply with ``prototypes``."""
        sent = by_space(reply.prototypes, ClassMeans)
        if len(sent) > 1:
            raise PayloadError(f"prototypes of {len(sent)} class spaces ({', '.join(sent)}), expected one at most")
        for space, means in sent.items():
            if not self._admits(reply.sender, space):
                raise PayloadError(f"prototypes of the class space '{space}', which is not the client's")
            means.require(reply.sender.samples)
            require_shape(space, means.shape, self._shapes.setdefault(space, means.shape))


def global_prototypes(server: Server) -> dict[str, GlobalPrototypes]:
    return by_space(server.state.get(PROTOTYPES, {}), GlobalPrototypes)


def known_classes(client: Client) -> int:
    assert client.head is not None
    return class_count(client.head)


def require_shape(space: str, shape: tuple[int, int], expected: tuple[int, int]) -> None:
    if shape != expected:
        raise PayloadError(
            f"prototypes of the class space '{space}' have {shape[0]} classes of width {shape[1]}, expected "
            f"{expected[0]} of width {expected[1]}: set task.classes and model.dim alike for all whose classes are the "
            "same"
        )
