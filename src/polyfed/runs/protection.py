"""What can be known of protection before a run begins: noise, cohorts that are large enough, and attackers."""

from __future__ import annotations

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.engines.attackers import ColludingEngine
from polyfed.engines.engine import Hosting
from polyfed.federation.attack import attacks_by_client
from polyfed.federation.attacks import Conspiracy
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Engine
from polyfed.federation.population import Population
from polyfed.federation.robust_replies import require_enough
from polyfed.federation.secure_ask import require_several
from polyfed.privacy.accounting import accounting
from polyfed.privacy.guard import PRIVATE, PrivacyGuard
from polyfed.privacy.private_training import opacus_optimizers, require_per_sample
from polyfed.privacy.settings import require_covered
from polyfed.runs.settings import ExperimentSettings
from polyfed.wire.schema import steps_of

# ---- differential privacy


def require_private(experiment: ExperimentSettings) -> None:
    """Check that all that clients send is protected.

    Raises:
        ConfigError: something is not, or a package is not installed.
    """
    policy, method = experiment.policy, experiment.algorithm
    if (settings := policy.privacy) is None:
        return
    accounting()
    require_covered(settings, policy.steps, method.component_name())
    if settings.samples is not None:
        opacus_optimizers()
        require_learning_by_fit(type(method))
    if settings.metrics == "none" and experiment.run.evaluate_clients is not False:
        raise ConfigError(
            "run.evaluate_clients: metrics of clients' test samples are sent as they are, which privacy does not "
            "cover; set run.evaluate_clients: false, or accept it with privacy.metrics: clear"
        )
    if not policy.charged:
        raise ConfigError(
            f"privacy has no effect: clients of '{method.component_name()}' send nothing to protect; leave it out"
        )
    if settings.reply is not None:
        _require_within_budget(experiment, policy.planned(settings.budget.delta), "a client")


def require_learning_by_fit(method: type[Algorithm]) -> None:
    """Check that DP-SGD sees all that clients of a method learn of private data.

    Raises:
        ConfigError: nobody has vouched for that.
    """
    # what derives from a class that does may do more
    if not vars(method).get("learns_by_fit"):
        raise ConfigError(
            f"privacy.samples: clients of '{method.component_name()}' may learn of private data beside client.fit, "
            "which DP-SGD does not see; choose fedavg, fedet or fedmkd, or protect the reply (privacy.reply)"
        )


def require_affordable(experiment: ExperimentSettings, federation: Population) -> None:
    """Check that DP-SGD suits tasks and models of simulated clients, and that its planned rounds are within the budget.

    Raises:
        ConfigError: it does not, or they are not.
    """
    settings = experiment.policy.privacy
    if settings is None or settings.samples is None:
        return
    for member in {info.architecture: federation.members[info.id] for info in federation.infos}.values():
        require_per_sample(member.settings.task, federation.client_model(member), member.id)
    for info in federation.infos:
        _require_within_budget(experiment, planned_epsilon(experiment, info), f"'{info.id}'")


def _require_within_budget(experiment: ExperimentSettings, planned: float | None, who: str) -> None:
    settings, run = experiment.privacy, experiment.run
    # who is drawn for some rounds may stay within; who is asked in all of them does not
    if settings is None or settings.budget.epsilon is None or run.sampling.cohort is not None:
        return
    budget, limit = settings.budget, settings.budget.epsilon
    if planned is not None and planned > limit * (1 + 1e-6):
        raise ConfigError(
            f"privacy.budget.epsilon is {limit:g}, but {settings.planned_releases(run.rounds)} replies of {who} cost "
            f"epsilon {planned:.3g} at delta {budget.delta:g}; lower run.rounds, or raise the budget or "
            "noise_multiplier (that of privacy.reply may be left out: it follows from the budget)"
        )


def planned_epsilon(experiment: ExperimentSettings, client: ClientInfo) -> float | None:
    """Planned epsilon of a client with one protected reply a round, at the budget's delta; None if nobody can tell."""
    policy, group = experiment.policy, experiment.clients.get(client.group)
    if policy.privacy is None:
        return None
    delta = policy.privacy.budget.delta
    if policy.privacy.samples is None:
        return policy.planned(delta)
    if group is None:  # its batches are known at its site alone
        return None
    by_step = policy.planned_training(client.samples, group.training.batch_size, delta, policy.privacy.neighbours)
    return next(iter(by_step.values()))


def prepare_secret(hosting: Hosting) -> None:
    """Read or make the secret of a simulation before its processes begin.

    Raises:
        ConfigError: it cannot be read.
    """
    if hosting.spec.privacy is not None and hosting.federation.members:
        PrivacyGuard(hosting.spec.privacy, hosting.folder / PRIVATE, hosting.settings.secret).prepare()


# ---- who is asked, and who attacks


def require_cohorts(experiment: ExperimentSettings, clients: tuple[ClientInfo, ...]) -> None:
    """Check that each round's cohort has enough clients of each type for ``aggregation.robust``, or ``secure``.

    Raises:
        ConfigError: naming the first round, the type and its clients.
    """
    rule, secure, run = experiment.aggregation.robust, experiment.aggregation.secure, experiment.run
    if rule is None and secure is None:
        return
    for number in range(1, 2 if run.sampling.cohort is None else run.rounds + 1):
        cohort = run.sampling.draw(clients, generator(run.seed, number, "cohort"))
        if rule is not None:
            require_enough(rule, cohort, f"round {number}")
        if secure is not None:
            require_several(cohort, f"round {number}")


def require_attackers(experiment: ExperimentSettings, federation: Population) -> None:
    """Check that ``run.attackers`` are clients of this simulation and can attack as they are to.

    Raises:
        ConfigError: they are not or cannot, or the run is a deployment.
    """
    run = experiment.run
    if not run.attackers:
        return
    if not federation.members:
        raise ConfigError("run.attackers: there are no clients in 'clients' who could attack; leave it out")
    attacks = attacks_by_client(run.attackers, federation.infos, run.seed)
    for attack in run.attackers:
        own = [member for name, member in federation.members.items() if attacks.get(name) is attack]
        attack.require(own, federation.infos)
        for member in () if attack.falsifies else own:
            split = federation.data.split(member.settings.source, member.settings.split)
            attack.poisoned(federation.train(member), member, split, run.seed)  # what is not there fails here


def with_conspirators(engine: Engine, experiment: ExperimentSettings) -> Engine:
    """The engine, with the attackers who agree on what they send."""
    run = experiment.run
    attacks = attacks_by_client(run.attackers, engine.clients(), run.seed) if run.attackers else {}
    agreed = {name: attack for name, attack in attacks.items() if isinstance(attack, Conspiracy)}
    if not agreed:
        return engine
    return ColludingEngine(engine, agreed, steps_of(experiment.algorithm), run.exchange.transport, run.exchange.limits)
