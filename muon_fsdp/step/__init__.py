"""Run a planned step on the current parameters of an optimizer, stage by stage."""
