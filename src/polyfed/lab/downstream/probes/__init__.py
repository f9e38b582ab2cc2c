"""Downstream probes that come with polyfed, one a module."""
