import os
import subprocess
import sys

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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_serves_the_next_tensors():
    program = """
import polyfed, resource, torch
from polyfed.core.device import keep_freed_memory

keep_freed_memory()
for time in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        models = [torch.zeros(780_000) for _ in range(3)]
        del models
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100, "new pages; 35,000 where memory goes back to the system"
