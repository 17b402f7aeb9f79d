"""Run the training program as `python -m muon_fsdp.training`, also under torchrun."""

import os

from muon_fsdp.training.ending import end_process
from muon_fsdp.training.terminal import import_torch

try:
    if os.environ.get("RANK", "0") == "0":
        import_torch("rank 0" if "RANK" in os.environ else "python -m muon_fsdp.training")
    from muon_fsdp.training.program import main

    code = main()
except KeyboardInterrupt:  # while torch is imported
    code = 130
end_process(code)
