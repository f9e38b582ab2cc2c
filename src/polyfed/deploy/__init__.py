"""Deployment: real federations over Flower's SuperLink and SuperNodes."""
