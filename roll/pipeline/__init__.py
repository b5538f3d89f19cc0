"""The training pipelines: main loop, stages, checkpoints, resumption, and the rollout side of each pipeline."""
