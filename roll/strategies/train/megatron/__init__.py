"""`megatron_train`: models of megatron-core, shared out over tensor-, pipeline-, expert- and data-parallel ranks."""
