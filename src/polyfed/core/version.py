"""The version of polyfed."""

__version__ = "0.3.0"
