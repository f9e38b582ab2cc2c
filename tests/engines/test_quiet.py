import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_threads_wait_for_a_moment_unless_the_user_sets_otherwise_before_torch_is_there(given, expected):
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import sys, os, polyfed; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [expected, "False"]
