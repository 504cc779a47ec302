"""Checkpoints of DeepSpeed, and of Megatron-DeepSpeed on top of it."""
