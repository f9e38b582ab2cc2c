"""Deployment: real federations over Flower's SuperLink and the sites' own connections to it."""
