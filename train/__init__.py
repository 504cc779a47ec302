"""A Megatron-style GPT pre-trainer on DeepSpeed and torch, small enough for a laptop CPU.

It saves real DeepSpeed checkpoints with Megatron-DeepSpeed's client state; on resume the
checkpoint wins over the config, and the first line it prints says what the live engine holds.
"""
