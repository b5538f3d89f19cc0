"""A run: its loop, its stages, its checkpoints, and what the two pipelines put into them."""
