"""Downstream tests of trained encoders: few-shot classification and retrieval."""
