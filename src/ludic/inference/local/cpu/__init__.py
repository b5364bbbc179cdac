"""The engine as it runs on a CPU: each step ends before the next one begins, in fixed shapes where
results must repeat to the bit. `deterministic=True` on a GPU runs it, too."""
