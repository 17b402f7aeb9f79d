"""Plan a step from shapes and layouts alone, without parameters and process groups."""
