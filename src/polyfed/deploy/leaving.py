"""What leaves a site with the planned run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.deploy.findings import Finding
from polyfed.deploy.settings import SiteConfig
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.membership import Member
from polyfed.federation.population import Population
from polyfed.privacy.masking.mask_keeper import masking_replies
from polyfed.privacy.policy import Sendable, SentField
from polyfed.privacy.secure_sum import SecureSum
from polyfed.privacy.settings import KIND_KEYS
from polyfed.wire.payload import PublicRows, Representations, TensorBundle, Weights
from polyfed.wire.schema import steps_of


def what_leaves(population: Population, config: SiteConfig, plan: RunSpec | None) -> Iterator[Finding]:
    """For every step, what each client replies, and what hides it; then what stays in the clear, and what is known."""
    if plan is None:
        methods = ", ".join(config.algorithms) or "any that polyfed ships"
        detail = f"nobody wrote down what is planned; methods that may run here: {methods}"
        yield Finding("warning", "leaves with a run", detail, "ask the server's operator for plan.yaml")
    else:
        yield from _Leaving(population, plan).findings()
        parts = [
            f"{sent.field or 'numbers'} of {sent.step}"
            for sent in plan.policy.fields
            if sent.step_kind == "step" and not (sent.masked or sent.noisy)
        ]
        parts += ["test metrics"] if plan.evaluates else []
        parts += ["what is known at the start (ids, modalities, task, number of samples)", "who replied, and when"]
        yield Finding("ok", "stays in the clear", ", ".join(parts))
    for info in population.infos:
        facts = vars(info) | {"modalities": "+".join(info.modalities)}
        yield Finding("ok", "leaves at the start", ", ".join(f"{key} {value}" for key, value in facts.items()))
    if config.tracebacks:
        detail = "message and traceback of a failed step; they may show paths, file names, texts and values"
        remedy = "set tracebacks: false in site.yaml to send the class of error and a number alone"
        yield Finding("warning", "leaves on failure", detail, remedy)
    else:
        yield Finding("ok", "leaves on failure", "the class of error and a number; the text is in the site's log")
    yield Finding(
        "ok",
        "never leaves",
        "samples, labels, their ids and file names, what clients keep in the state folder, the node key. This holds "
        "for polyfed's own steps; Flower runs here the app that the server sends, so the site trusts its operator",
    )


@dataclass(frozen=True)
class _Leaving:
    """What leaves with the planned run.

    Attributes:
        population: who lives here.
        plan: the run.
    """

    population: Population
    plan: RunSpec

    def findings(self) -> Iterator[Finding]:
        """A line for each step, with whose reply it is."""
        what = f"leaves with {self.plan.algorithm.component_name()}"
        for step, fields in self._steps().items():
            senders: dict[str, list[str]] = {}
            for member in self.population.members.values():
                senders.setdefault(self._reply(fields, member), []).append(member.id)
            for reply, ids in senders.items():
                yield Finding("ok", what, f"{', '.join(ids)}: {step}: {reply}")
        if self._secure is not None:
            for step, reply in masking_replies().items():
                yield Finding("ok", what, f"{', '.join(self.population.members)}: {step}: {reply}")

    @property
    def _secure(self) -> SecureSum | None:
        return self.plan.secure if self.plan.secure is not None and self.plan.secure.masks else None

    def _steps(self) -> dict[str, list[SentField]]:
        steps: dict[str, list[SentField]] = {
            step: []
            for step, schema in steps_of(self.plan.algorithm).items()
            if schema.kind != "query" or self.plan.evaluates
        }
        for sent in self.plan.policy.fields:
            if sent.step in steps:
                steps[sent.step].append(sent)
        return steps

    def _reply(self, fields: list[SentField], member: Member) -> str:
        return ", ".join(self._field(sent, member) for sent in fields) or "nothing but that it is done"

    def _field(self, sent: SentField, member: Member) -> str:
        size = " or ".join(self._size(sent, kind, member) for kind in sent.kinds)
        description = f"{size}; {self.plan.policy.how(sent)}"
        if sent.field:
            return f"{sent.field} ({description})"
        examples = "metrics of its test" if sent.step_kind == "query" else "losses"
        return f"numbers such as {examples} ({description})"

    def _size(self, sent: SentField, kind: Sendable, member: Member) -> str:
        """What a field of a reply holds, and how large it is."""
        if not issubclass(kind, TensorBundle):
            return kind.__name__ if not sent.field else f"one {kind.__name__}"
        if issubclass(kind, Representations):
            return self._rows(sent, member)
        if issubclass(kind, Weights):
            state = self.population.client_model(member).exchanged()
            types = sorted({str(value.dtype).removeprefix("torch.") for value in state.values()})
            size = sum(value.numel() * (self._word(sent) or value.element_size()) for value in state.values())
            return f"{len(state):,} tensors of the model, {'+'.join(types)}, {size / 2**20:,.2f} MiB"
        of = "of public samples" if issubclass(kind, PublicRows) else "named tensors"
        return f"{KIND_KEYS.get(kind, kind.kind)}: {of}, of a size that the method decides"

    def _rows(self, sent: SentField, member: Member) -> str:
        samples = self.population.public_samples(member.views)
        if samples is None:
            return "of the public set, which there is none of"
        exchange = getattr(self.plan.algorithm, "public", None)
        drawn = exchange.samples if isinstance(exchange, PublicExchange) else None
        rows, width, names = drawn or len(samples), member.model.dim, list(samples.modalities)
        size = rows * width * (self._word(sent) or 4) * len(names) / 2**20
        kind = "" if sent.field == Representations.kind else "representations, "
        return f"{kind}{'+'.join(names)}: {rows:,} x {width} float32 each, {size:,.2f} MiB in all"

    def _word(self, sent: SentField) -> int | None:
        return self._secure.bits // 8 if self._secure is not None and sent.masked else None
