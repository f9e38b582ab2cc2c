import os

import pytest

from polyfed.core import device
from polyfed.core.errors import ConfigError
from polyfed.federation.settings import HostSettings
from polyfed.runs.settings import RunSettings


@pytest.mark.parametrize("settings", [RunSettings, HostSettings])
@pytest.mark.parametrize(("cores", "threads"), [({3}, 1), ({0, 1}, 2), (set(range(64)), 2)])
def test_threads_that_are_not_given_are_those_of_the_cores_and_stand_in_the_resolved_settings(
    monkeypatch, settings, cores, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores, raising=False)
    assert device.usable_cores() == len(cores)
    for resolved in (settings(), settings(threads=None)):
        assert resolved.threads == threads
        assert resolved.model_dump(mode="json")["threads"] == threads
    assert settings(threads=5).threads == 5


def test_a_missing_device_is_refused():
    with pytest.raises(ConfigError, match=r"run\.device 'nowhere' is not usable here"):
        device.resolve_device("nowhere")
