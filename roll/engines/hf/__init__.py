"""`hf_infer`: the embedded engine, continuous batching over a transformers model."""
