"""Pure aggregation: client tensors and scores in, one tensor out, streamed in client order."""
