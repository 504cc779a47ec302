"""Checkpoints made of plain torch state dicts: fairseq, Hugging Face, nanotron."""
