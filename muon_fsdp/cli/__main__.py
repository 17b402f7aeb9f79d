"""Run the command with `python -m muon_fsdp.cli`, where the script `muon-fsdp` is not installed."""

from muon_fsdp.cli import command

command()
