"""Planning from metadata alone: no tensors, no process groups."""
