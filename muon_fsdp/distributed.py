"""Gather sharded parameters into whole tensors and scatter them back: the public path of `comm/transfers.py`."""

from __future__ import annotations

from muon_fsdp.comm.dtensors import like, local
from muon_fsdp.comm.transfers import gather_full, scatter_full

__all__ = ["gather_full", "like", "local", "scatter_full"]
