"""Checkpoints of Megatron-LM: legacy and torch_dist."""
