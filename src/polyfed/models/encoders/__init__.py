"""Encoders: architectures of one modality, one a module."""
