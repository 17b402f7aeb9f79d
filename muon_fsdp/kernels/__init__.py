"""Run the kernels: products of an orthogonalization, norms, fused updates, and the choice of a kernel for a shape."""

from muon_fsdp.kernels.launch import Addend
from muon_fsdp.kernels.products import multiply_add, symmetric_product
from muon_fsdp.kernels.select import Choice, Product, on_device, select, unusable

__all__ = [
    "Addend",
    "Choice",
    "Product",
    "multiply_add",
    "on_device",
    "select",
    "symmetric_product",
    "unusable",
]
