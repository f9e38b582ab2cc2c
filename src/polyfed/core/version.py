"""The version of polyfed."""

__version__ = "0.5.0"
