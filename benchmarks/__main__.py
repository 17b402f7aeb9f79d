"""`python -m benchmarks` is `muon-fsdp bench`."""

from __future__ import annotations

import sys

from muon_fsdp.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    raise SystemExit(main())
