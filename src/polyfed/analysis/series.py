"""Series of runs: several experiments, each with several seeds, of which nothing complete is run again.

A series is planned as a whole, so that what is wrong with any of its runs is found before the first of them. Every
run has a folder of its own, ``OUT/<label>-seed<seed>``; a series that was stopped is continued by starting it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.core.randomness import generator
from polyfed.engines.flower import Flower
from polyfed.federation.client import ClientInfo
from polyfed.reporting.compare import Spread
from polyfed.reporting.reported import resume, run
from polyfed.reporting.tables import figure
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import open_run
from polyfed.runs.records import SERVER

Tell = Callable[[str], None]
BySeed = dict[str, dict[int, float]]
"""Label of an experiment -> seed -> final value of the server's primary metric."""


@dataclass(frozen=True)
class Trial:
    """One run of a series: an experiment (with its seed), what it is called, and its folder."""

    label: str
    experiment: Experiment
    folder: Path

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.experiment.run.seed

    @property
    def begun(self) -> bool:
        """Whether its folder holds a run."""
        return RunFolder(self.folder).has_begun()

    @property
    def complete(self) -> bool:
        """Whether its last round is on disk."""
        # a run that was killed has begun, and may have complete rounds
        newest = open_run(self.folder).newest_checkpoint if self.begun else None
        return newest is not None and newest.round == self.experiment.run.rounds

    def require_sound(self) -> None:
        """Check all that can be checked without opening data.

        Raises:
            ConfigError: the experiment cannot be run, or the folder holds another one.
            RunError: the folder holds something else.
        """
        cfg, engine = self.experiment, self.experiment.run.engine
        primary_metric(cfg)
        if isinstance(engine, Flower) and engine.is_deployed:
            raise ConfigError(
                "run.engine is a deployment, whose sites cannot be left out at will; simulate: --set run.engine=local"
            )
        engine.require()
        cfg.algorithm.require(has_public=cfg.public is not None, has_server=cfg.server is not None)
        # a cohort can be drawn; what it is drawn from are stand-ins, as many as there are clients
        groups = [(name, k) for name, group in cfg.clients.items() for k in range(group.count)]
        try:
            cfg.run.sampling.draw(
                tuple(ClientInfo(f"{name}-{k}", name, (), "", 1, "") for name, k in groups), generator(0)
            )
        except ConfigError as error:
            raise ConfigError(f"'{self.label}': {error}; a share (such as 0.5) suits every size") from error
        if not self.begun:
            RunFolder.require_free(self.folder)
        elif open_run(self.folder).experiment.to_yaml() != cfg.to_yaml():
            raise ConfigError(
                f"'{self.folder}' holds a run with other settings than '{self.label}', seed {self.seed}; "
                "choose another --out, or give the settings that this folder was begun with"
            )

    def final(self) -> float:
        """The server's primary test metric after the last round.

        Raises:
            RunError: the run did not record it.
        """
        metric, rounds = primary_metric(self.experiment), self.experiment.run.rounds
        values = open_run(self.folder).records.series(SERVER, metric)
        if rounds not in values:
            raise RunError(f"run '{self.folder}' has no test {metric} of round {rounds}; remove it to run it again")
        return values[rounds]


def primary_metric(experiment: Experiment) -> str:
    """The primary metric of the server's task, which judges a series; raises ConfigError without a server model."""
    if experiment.server is None:
        raise ConfigError(f"'{experiment.name}' has no server model to judge runs by; add a 'server' section")
    return experiment.server.task.primary


def require_groups(experiment: Experiment, names: Sequence[str], option: str) -> None:
    """Raise ConfigError unless ``names`` are different groups of the experiment, at least one."""
    if not names:
        raise ConfigError(f"{option} names no group; {nearest('', experiment.clients)}")
    for name in names:
        if name not in experiment.clients:
            raise ConfigError(f"{option}: no group '{name}' under 'clients'; {nearest(name, experiment.clients)}")
        if names.count(name) > 1:
            raise ConfigError(f"{option}: '{name}' is named {names.count(name)} times; name it once")


def without(experiment: Experiment, left_out: Sequence[str], label: str) -> Experiment:
    """The experiment without some of its groups, called ``<name>-<label>``.

    What the other clients hold does not change: partitions are drawn for each group on its own.

    Raises:
        ConfigError: no client would be left.
    """
    kept = {name: group for name, group in experiment.clients.items() if name not in left_out}
    if not kept:
        raise ConfigError(
            f"without {', '.join(left_out)} no client is left, and a run needs one; name fewer groups, "
            "so that at least one always takes part"
        )
    run = experiment.run
    if isinstance(cohort := run.sampling.cohort, dict):  # it names every group
        sampling = run.sampling.model_copy(update={"cohort": {name: cohort[name] for name in kept if name in cohort}})
        run = run.model_copy(update={"sampling": sampling})
    return experiment.model_copy(update={"clients": kept, "run": run, "name": f"{experiment.name}-{label}"})


def planned_trials(experiments: Mapping[str, Experiment], seeds: Sequence[int], out: Path) -> list[Trial]:
    """The runs of a series, each checked as far as that is possible without opening data.

    Args:
        experiments: label -> experiment; labels become names of folders.
        seeds: every experiment is run with each of them.
        out: folder of the series.

    Raises:
        ConfigError, RunError: a run is impossible, or its folder holds something else.
    """
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds {list(seeds)} must be different numbers from 0 on, at least one")
    trials = []
    for label, experiment in experiments.items():
        for seed in seeds:
            seeded = experiment.model_copy(update={"run": experiment.run.model_copy(update={"seed": seed})})
            trials.append(Trial(label, seeded, out / f"{label}-seed{seed}"))
            trials[-1].require_sound()  # before any run: a series may take days
    return trials


def final_values(trials: Sequence[Trial], tell: Tell = lambda line: None) -> BySeed:
    """Run what is not complete, in order, and collect the final values.

    Args:
        trials: planned runs.
        tell: is given one line before and one after each run.
    """
    values: BySeed = {}
    for number, trial in enumerate(trials, start=1):
        where = f"run {number} of {len(trials)}: {trial.label}, seed {trial.seed}"
        was_complete = trial.complete
        if not was_complete:
            tell(f"{where}: {'continued' if trial.begun else 'started'}; watch it with: polyfed watch {trial.folder}")
            if trial.begun:
                resume(trial.folder)
            else:
                run(trial.experiment, trial.folder)
        value = values.setdefault(trial.label, {})[trial.seed] = trial.final()
        tell(f"{where}: {primary_metric(trial.experiment)} {figure(value)}{' (was complete)' * was_complete}")
    return values


def spreads_of(values: BySeed) -> dict[str, Spread]:
    """Label -> mean and sample standard deviation over the seeds."""
    return {label: Spread.of(list(by_seed.values())) for label, by_seed in values.items()}


def series_json(values: BySeed) -> dict[str, Any]:
    """Label -> mean, standard deviation (NaN for one seed) and the value of every seed."""
    return {
        label: {"mean": spread.mean, "std": spread.std, "by_seed": {str(k): v for k, v in values[label].items()}}
        for label, spread in spreads_of(values).items()
    }
