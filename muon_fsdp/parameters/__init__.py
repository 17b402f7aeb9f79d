"""Parameters as users give them: rules, groups, wrappers and saved state."""
