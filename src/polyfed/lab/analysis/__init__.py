"""Analyses of federations: who contributes what, what more data brings, and what a trained model looks like inside."""
