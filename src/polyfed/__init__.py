"""polyfed: multimodal federated learning.

Image clients, text clients and image-text clients, each with data, task and architecture of its own, train together
without sharing data:

    from polyfed import Experiment, run

    result = run(Experiment.load("scenes-demo"), out="runs/demo")
    print(result.metrics())
"""

from polyfed.errors import PolyfedError
from polyfed.experiment import Experiment
from polyfed.runner import Run, resume, run

__version__ = "0.1.0"
__all__ = ["Experiment", "PolyfedError", "Run", "__version__", "resume", "run"]
