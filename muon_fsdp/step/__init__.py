"""One step: a plan with its live parameters, run stage by stage."""
