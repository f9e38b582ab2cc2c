"""Engines that a deployment brings: the home of engines, in its zone."""
