"""What will leave a site, from what its allowed methods declare to return; and what never does."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from types import UnionType
from typing import TYPE_CHECKING, Any

from polyfed.deploy.findings import Finding

if TYPE_CHECKING:
    from polyfed.algorithms.algorithm import Algorithm
    from polyfed.deploy.site_config import SiteConfig
    from polyfed.federation.membership import Member
    from polyfed.federation.population import Population
    from polyfed.wire.schema import Declared, StepSchema

_MIB = 2**20


def allowed_methods(config: SiteConfig) -> dict[str, type[Algorithm]]:
    """The methods that may run here, by name.

    Raises:
        ConfigError: one of them does not exist.
    """
    from typing import cast

    from polyfed.algorithms.algorithm import Algorithm
    from polyfed.core.errors import ConfigError

    try:
        kinds = {name: Algorithm.named(name) for name in config.algorithms} or Algorithm.available()
    except ValueError as error:
        raise ConfigError(f"algorithms: {error}") from error
    return cast("dict[str, type[Algorithm]]", kinds)


def what_leaves(population: Population, config: SiteConfig) -> Iterator[Finding]:
    """For every step of an allowed method, what each client replies; then what is known of every client."""
    from polyfed.wire.schema import steps_of

    for name, kind in allowed_methods(config).items():
        for step, schema in steps_of(kind).items():
            senders: dict[str, list[str]] = {}
            for member in population.members.values():
                senders.setdefault(_reply(schema, population, member), []).append(member.id)
            for reply, ids in senders.items():
                yield Finding("ok", f"leaves with {name}", f"{', '.join(ids)}: {step}: {reply}")
    for info in population.infos:
        yield Finding("ok", "leaves at the start", ", ".join(f"{key} {value}" for key, value in _shown(info)))
    yield _errors(config)
    yield Finding(
        "ok",
        "never leaves",
        "samples, labels, their ids and file names, what clients keep in the state folder, the node key. This holds "
        "for polyfed's own steps; Flower runs here the app that the server sends, so the site trusts its operator",
    )


def _shown(info: Any) -> Iterator[tuple[str, str]]:
    for key, value in vars(info).items():
        yield key, "+".join(value) if isinstance(value, tuple) else str(value)


def _errors(config: SiteConfig) -> Finding:
    if config.tracebacks:
        return Finding(
            "warning",
            "leaves on failure",
            "message and traceback of a failed step; they may show paths and values",
            "set tracebacks: false in site.yaml to send the message alone",
        )
    return Finding("ok", "leaves on failure", "the message of a failed step, which may show a path or a value")


def _reply(schema: StepSchema, population: Population, member: Member) -> str:
    fields = [f"{name} ({_field(kind, population, member)})" for name, kind in schema.returns.items()]
    if schema.others is not None:
        fields.append(f"numbers such as metrics of its test ({schema.others.__name__} each)")
    return ", ".join(fields) or "nothing but that it is done"


def _field(kind: Declared, population: Population, member: Member) -> str:
    from polyfed.wire.payload import Representations, TensorBundle, Weights

    if isinstance(kind, UnionType):
        return " or ".join(_field(each, population, member) for each in typing.get_args(kind))
    if not issubclass(kind, TensorBundle):
        return f"one {kind.__name__}"
    if issubclass(kind, Representations):
        return _representations(population, member)
    if issubclass(kind, Weights):
        return _weights(population, member)
    return f"{kind.kind}: named tensors whose sizes the method decides"


def _representations(population: Population, member: Member) -> str:
    samples = population.public_samples({name: encoder.view for name, encoder in member.model.encoders.items()})
    if samples is None:
        return "of the public set, which there is none of"
    rows, width, names = len(samples), member.model.dim, list(samples.modalities)
    size = rows * width * 4 * len(names) / _MIB
    return f"{'+'.join(names)}: {rows:,} x {width} float32 each, {size:,.2f} MiB in all"


def _weights(population: Population, member: Member) -> str:
    state = population.client_model(member).state_dict()
    kinds = sorted({str(value.dtype).removeprefix("torch.") for value in state.values()})
    size = sum(value.numel() * value.element_size() for value in state.values()) / _MIB
    return f"{len(state):,} tensors of the model, {'+'.join(kinds)}, {size:,.2f} MiB"
