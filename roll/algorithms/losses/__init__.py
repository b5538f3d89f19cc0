"""Per-token policy-gradient losses: one file per loss, named by its `pg_variant`.

By default, the old policy in a ratio is the behaviour policy: the log-probabilities recorded at sampling. A run can use
recomputed ones instead. With the default, every correction sees the real distance between the sampling policy and the
trained policy.
"""
