import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_wait_passively_unless_the_user_says_otherwise_before_torch_is_there(given, expected):
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = "import sys, os, polyfed; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [expected, "False"]
