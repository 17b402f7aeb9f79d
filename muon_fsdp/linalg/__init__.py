"""Compute with whole matrices: orthogonalization, singular values, spheres. Nothing here knows parameters or ranks."""
