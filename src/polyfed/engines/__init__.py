"""Engines: where client steps execute."""
