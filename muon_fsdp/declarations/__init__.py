"""Declare what a rule has: options, state, and how a parameter is read as matrices."""
