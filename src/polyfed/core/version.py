"""The version of polyfed."""

__version__ = "0.1.0"
