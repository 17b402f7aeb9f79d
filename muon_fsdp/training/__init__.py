"""Train a GPT with the library's optimizers; the programs here use the library as any user would."""
