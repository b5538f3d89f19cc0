"""`megatron_train`: models of megatron-core, split over tensor-, pipeline-, expert- and data-parallel ranks."""
