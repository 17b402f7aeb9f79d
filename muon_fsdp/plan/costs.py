"""Hold the speeds that the planner and `muon-fsdp plan` assume. It imports nothing, so that the command starts fast."""

# Speeds of one rank. FLOPs count symmetric products in full, although only half of each is computed. Counted this way,
# one H200 reached 840 to 1,030 TFLOP/s on large matrices (docs/performance.md).
FLOPS_PER_SECOND = 9e14
BYTES_PER_SECOND = 5e10  # sent, and also received: one 400 Gb/s network card per rank
MEMORY_BYTES_PER_SECOND = 4.2e12  # device memory: a copy on an H200
FIXED_SECONDS = 1e-4  # of any transfer
