"""Formats whose trainers print no rate: it is in what they log."""

MUTE = ("lightning", "lightning-sharded", "lightning-deepspeed", "nemo", "torchtitan")
