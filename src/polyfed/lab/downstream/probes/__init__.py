"""Downstream probes that come with polyfed."""
