"""The version of polyfed, and the generation of its figures."""

__version__ = "0.4.0"
# of figures: a commit after which runs have others, as benchmarks/bits.py tells, raises it; earlier records are stale
GENERATION = 1
