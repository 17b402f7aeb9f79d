"""The products an orthogonalization is made of; one place to put a faster kernel under the iteration."""

from muon_fsdp.kernels.products import multiply_add, symmetric_product

__all__ = ["multiply_add", "symmetric_product"]
