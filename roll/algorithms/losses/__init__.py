"""Policy-gradient losses per token: one file per loss, named by its `pg_variant`.

The old policy of a ratio is the one that sampled the tokens, with the log-probabilities recorded then, unless a run
asks for recomputed ones. Every correction therefore sees the real distance between the sampling policy and the trained
policy.
"""
