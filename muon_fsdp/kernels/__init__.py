"""The products an orthogonalization is made of, fused element-wise updates, and which kernel runs for which shape."""

from muon_fsdp.kernels.products import multiply_add, symmetric_product
from muon_fsdp.kernels.select import Choice, Product, on_device, select, unusable

__all__ = ["Choice", "Product", "multiply_add", "on_device", "select", "symmetric_product", "unusable"]
