"""Subclasses of torch.optim.Optimizer."""
