"""Compute statistics of weights on shards, on all ranks together."""
