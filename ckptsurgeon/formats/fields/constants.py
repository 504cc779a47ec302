"""Names that several families of trainers, and the rooms above, must know alike."""

from __future__ import annotations

TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar")
"""How the names of files of torch.save end, most of the time."""
PICKLED = ".pkl"
"""Of such a file, or of a plain pickle."""
SAFE = ".safetensors"
TRAINER_STATE = "trainer_state.json"
"""Hugging Face's: its counters and all that it logged, beside the shards of a step."""
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's pointer."""
GROUP = ("lr", "initial_lr", "betas", "eps", "weight_decay")
"""Fields that most optimizers have in their param groups."""
NESTED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes puts a state that has codes, so that FSDP leaves it alone."""
QUANTIZED = {
    "exp_avg": ("state1", "absmax1", "qmap1"),
    "exp_avg_sq": ("state2", "absmax2", "qmap2"),
}
"""bitsandbytes: codes, scales of their blocks, code book."""
CODES = "uint8"
"""The dtype of codes; what is too small for them is kept under the same keys as numbers."""
ODD = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What a tree that no trainer saved makes of the code that expects one."""
