"""Class prototypes that a server keeps and clients receive, make and send, and checks of the latter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.prototypes import ClassAverage, ClassMeans, GlobalPrototypes, by_space, prototype_tensors
from polyfed.algorithms.algorithm import Client, ClientInfo, Reply, Server
from polyfed.core.errors import PayloadError
from polyfed.data.samples import Samples
from polyfed.models.heads import class_count
from polyfed.tasks import evaluating
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Prototypes

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


def prototypes_for(server: Server, client: ClientInfo, admits: Callable[[ClientInfo, str], bool]) -> Prototypes:
    """Global prototypes of the class spaces that can be a client's; empty while there are none."""
    kept = server.state.get(PROTOTYPES, {})
    return Prototypes({name: kept[name] for name in kept if admits(client, name.rpartition(".")[0])})


def received_prototypes(client: Client, prototypes: Prototypes, space: str) -> GlobalPrototypes | None:
    """Global prototypes of a client's class space, on its device; None before there are any, or for other tasks.

    Raises:
        PayloadError: they have another number of classes or another width.
    """
    known = by_space(prototypes, GlobalPrototypes).get(space)
    if known is None or not isinstance(client.task, Classification):
        return None
    require_shape(space, known.shape, (known_classes(client), client.model.dim))
    return GlobalPrototypes(*(part.to(client.device) for part in known))


def class_features(client: Client, samples: Samples, *, unit: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Features that a client classifies [b, d], of unit length if so asked, and classes of samples, batch by batch in
    order, in evaluation mode and view."""
    task = client.task
    assert isinstance(task, Classification)
    with evaluating(client.model):
        for batch in (one.to(client.device) for one in task.usable(samples).batches(client.evaluation_batch)):
            with client.autocast():
                features = task.feature(client.model, client.head, batch)
            yield as_prototypes(features, unit=unit).float(), batch.targets[task.target].long()


def as_prototypes(features: Float[Tensor, "b d"], *, unit: bool) -> Float[Tensor, "b d"]:
    """Features as they are averaged and compared."""
    return F.normalize(features.float(), dim=-1) if unit else features


def own_prototypes(client: Client, samples: Samples, space: str, *, unit: bool, min_count: int = 1) -> Prototypes:
    """Means by class of the features of a client's samples; empty if it has enough of no class, unless noise is to hide
    that."""
    average = ClassAverage(known_classes(client), client.model.dim, client.device)
    for features, labels in class_features(client, samples, unit=unit):
        average.add(features, labels)
    means = average.result(min_count)
    return Prototypes(prototype_tensors(space, means) if len(means.counts) or client.protected else {})


def require_shape(space: str, shape: tuple[int, int], expected: tuple[int, int]) -> None:
    if shape != expected:
        raise PayloadError(
            f"prototypes of the class space '{space}' have {shape[0]} classes of width {shape[1]}, expected "
            f"{expected[0]} of width {expected[1]}: set task.classes and model.dim alike for all whose classes are the "
            "same"
        )
