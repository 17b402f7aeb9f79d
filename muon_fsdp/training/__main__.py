"""`python -m muon_fsdp.training`, also under torchrun: the training program."""

from muon_fsdp.training.program import main

raise SystemExit(main())
