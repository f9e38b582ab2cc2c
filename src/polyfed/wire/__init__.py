"""Messages between server and clients: payloads, their encoding, limits, the ledger."""
