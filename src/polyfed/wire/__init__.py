"""What crosses between server and clients: payloads, their encoding and compression, limits, the ledger."""
