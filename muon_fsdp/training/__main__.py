"""Run the training program as `python -m muon_fsdp.training`, also under torchrun."""

from muon_fsdp.training.ending import end_process

try:
    from muon_fsdp.training.program import main

    code = main()
except KeyboardInterrupt:  # while torch is imported
    code = 130
end_process(code)
