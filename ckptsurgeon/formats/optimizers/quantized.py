"""Optimizers whose state has 4 or 8 bits an element (bitsandbytes 0.50.2, torchao 0.18.0).

bitsandbytes numbers its moments: codes in `state1` stand for the numbers of `qmap1`, times the
largest value of a block in `absmax1`. torchao's tensors are objects of its own classes, of which
only its optimizer makes new ones.
"""

from __future__ import annotations

from ckptsurgeon.formats.optimizers.entry import entry

FIRST = "step state1 qmap1=constant absmax1 max1 new_max1 gnorm_vec unorm_vec"
SECOND = "state2 qmap2=constant absmax2 max2 new_max2"

ENTRIES = (
    entry("Adam, AdamW, LAMB or AdEMAMix of bitsandbytes", "bitsandbytes/optim/optimizer.py",
          f"{FIRST} {SECOND}", "betas eps alpha t_alpha t_beta3 bias_correction"),
    entry("Lion, SGD, LARS, RMSprop or Adagrad of bitsandbytes", "bitsandbytes/optim/optimizer.py",
          FIRST, "betas eps"),
    entry("PytorchLARS", "bitsandbytes/optim/lars.py", "momentum_buffer",
          "momentum dampening nesterov max_unorm", unless="dampening"),
)  # fmt: skip
