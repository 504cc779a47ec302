"""Checkpoints of Hugging Face's Trainer and of Accelerate: torch's state dicts, or an engine's."""
