"""Models that load without polyfed."""
