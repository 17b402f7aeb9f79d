"""Provide the optimizers, which are subclasses of torch.optim.Optimizer."""
