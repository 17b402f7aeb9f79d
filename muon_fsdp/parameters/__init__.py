"""Read what users pass in: parameters, groups, overrides, wrapped models and saved state."""
