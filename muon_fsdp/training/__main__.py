"""`python -m muon_fsdp.training`, also under torchrun: the training program."""

try:
    from muon_fsdp.training.program import main

    code = main()
except KeyboardInterrupt:  # while torch is imported
    code = 130
raise SystemExit(code)
