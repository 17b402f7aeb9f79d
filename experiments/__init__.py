"""Whole training runs that compare optimizers. Each module is a program; its results are in docs/experiments."""
