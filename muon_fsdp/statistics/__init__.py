"""Statistics of weights, found on shards by all ranks together."""
