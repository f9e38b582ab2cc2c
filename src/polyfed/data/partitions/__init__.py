"""The partitions that ship with polyfed, one a module."""
