"""Encoders: architectures of one modality."""
