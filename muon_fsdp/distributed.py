"""The public path of assembling and scattering sharded matrices."""

from __future__ import annotations

from muon_fsdp.comm.transfers import gather_full, like, local, scatter_full

__all__ = ["gather_full", "like", "local", "scatter_full"]
