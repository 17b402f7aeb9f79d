"""Mathematics on whole tensors."""
