"""`python -m muon_fsdp.cli`: the command, where no script is installed."""

from muon_fsdp.cli import command

command()
