"""Programs that train a small GPT with the library's optimizers, as any user would."""
