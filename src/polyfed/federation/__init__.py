"""Federations: clients, server, cohorts, payloads, the ledger and kept state."""
