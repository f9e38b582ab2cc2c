"""The version of polyfed."""

__version__ = "0.2.0"
