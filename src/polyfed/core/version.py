"""The version of polyfed."""

__version__ = "0.4.0"
