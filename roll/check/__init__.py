"""What a configuration means: whether it can work, its arithmetic, its memory and its needs.

An estimate of the memory that a run needs on each device, by arithmetic alone: no model or GPU is touched.

`estimate_memory` takes a configuration that passed `check_config`; `render` prints the estimate line by line, each with
its arithmetic. `docs/memory.md` explains each line for a 7B model; `benchmarks/README.md` compares the estimate with
measurements.
"""
