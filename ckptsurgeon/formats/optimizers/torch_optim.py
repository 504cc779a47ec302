"""The optimizers of torch itself (`torch/optim/*.py`, read and run at 2.13.0)."""

from __future__ import annotations

from dataclasses import replace

from ckptsurgeon.formats.optimizers.entry import entry

ADAM = "betas eps amsgrad capturable differentiable fused decoupled_weight_decay"

LISTED = (
    entry("Adam", "adam.py", "step exp_avg exp_avg_sq max_exp_avg_sq", ADAM),
    entry("AdamW", "adamw.py", "step exp_avg exp_avg_sq max_exp_avg_sq", ADAM),
    entry("NAdam", "nadam.py", "step mu_product=1 exp_avg exp_avg_sq",
          "betas eps momentum_decay decoupled_weight_decay capturable differentiable"),
    entry("RAdam", "radam.py", "step exp_avg exp_avg_sq",
          "betas eps decoupled_weight_decay capturable differentiable"),
    entry("Adamax", "adamax.py", "step exp_avg exp_inf", "betas eps capturable differentiable"),
    entry("SGD", "sgd.py", "momentum_buffer",
          "momentum dampening nesterov differentiable fused", unless="dampening"),
    entry("Adagrad", "adagrad.py", "step sum",
          "lr_decay eps initial_accumulator_value differentiable fused",
          unless="initial_accumulator_value"),
    entry("Adadelta", "adadelta.py", "step square_avg acc_delta",
          "rho eps capturable differentiable"),
    entry("RMSprop", "rmsprop.py", "step square_avg momentum_buffer grad_avg",
          "momentum alpha eps centered capturable differentiable"),
    entry("Rprop", "rprop.py", "step prev step_size=anew",
          "etas step_sizes capturable differentiable"),
    entry("ASGD", "asgd.py", "step eta=anew mu=anew ax=anew",
          "lambd alpha t0 capturable differentiable"),
    entry("Adafactor", "_adafactor.py", "step row_var col_var variance", "beta2_decay eps d"),
    entry("Muon", "_muon.py", "momentum_buffer",
          "momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn"),
    entry("LBFGS", "lbfgs.py",
          "func_evals=anew n_iter=anew d=anew t=anew old_dirs=anew old_stps=anew ro=anew "
          "H_diag=anew prev_flat_grad=anew prev_loss=anew al=anew",
          "max_iter max_eval tolerance_grad tolerance_change history_size line_search_fn"),
)  # fmt: skip

ENTRIES = tuple(replace(item, source=f"torch/optim/{item.source}") for item in LISTED)
"""With the path of each file in the library."""
