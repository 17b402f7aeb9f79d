"""Update matrices by NorMuon (arXiv 2510.05491): Muon that rescales each row by a running second moment."""

from __future__ import annotations

from collections.abc import Sequence

from muon_fsdp.declarations.option import Option, fraction, number
from muon_fsdp.declarations.state import PerMatrix
from muon_fsdp.linalg.scaling import damp, rescale_rows
from muon_fsdp.rules.base import MatrixBatch
from muon_fsdp.rules.muon import Muon


class NorMuon(Muon):
    """The NorMuon rule: Muon that rescales each row of the update by a running second moment.

        O = polar(momentum)
        v = beta2 * v + (1 - beta2) * mean of O^2 over a row
        U = scale * ns_stepsize * c * O / (sqrt(v) + eps) * min(1, ||momentum||_F / momentum_eps)

    The factor c keeps the Frobenius norm of O, so `scale` and lr mean the same as for Muon.
    """

    name = "normuon"
    title = "NorMuon"
    paper = "arXiv 2510.05491"
    options = (
        *Muon.options,
        Option("beta2", 0.95, "decay of the second moment of each row, in [0, 1)", check=fraction),
        Option("eps", 1e-8, "added to the square root of the second moment of each row", check=number),
    )
    state = (*Muon.state, PerMatrix("second_moment", "rows"))
    overwrites_matrices = True

    def direction(self, batch: MatrixBatch) -> None:
        NorMuon.directions(self, [batch])

    def directions(self, batches: Sequence[MatrixBatch]) -> None:
        for batch, norms in zip(batches, self._orthogonalize(batches), strict=True):
            options = batch.options
            rescale_rows(
                batch.update,
                batch.state["second_moment"],
                factor=self.factor(options, *batch.update.shape[-2:]),
                beta2=options["beta2"],
                eps=options["eps"],
            )
            damp(batch.update, norms, options["momentum_eps"])  # last, so that the second moments are those of O
