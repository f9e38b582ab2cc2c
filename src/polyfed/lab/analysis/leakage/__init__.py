"""What a run gave away: attacks on what its clients sent, and on its models."""
