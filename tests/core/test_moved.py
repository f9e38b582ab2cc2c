"""Keys that moved are read where they stood."""

from __future__ import annotations

import pytest

from polyfed.runs.experiment import Experiment
from small_federations import Config


def test_what_moved_is_read_under_its_old_name_with_one_warning(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    tiny["run"] |= {"sinks": [], "output": {"plots": True}, "deadline": 5.0}
    experiment = Experiment.load(tiny, ["run.plots=false", "run.phases.fit.min_clients=2", "run.min_clients=0"])
    assert experiment.run.output.plots is False
    assert experiment.run.exchange.deadline == 5
    assert experiment.run.exchange.reply_policy("fit").min_clients == 2
    assert caplog.messages.count("run.deadline is run.exchange.deadline now; the old name is still read") <= 1
