"""The optimizers that trainers bring along: of DeepSpeed, Megatron, apex, Hugging Face and others.

Read in the sources named; which of them a test runs is in docs/optimizers.md.
"""

from __future__ import annotations

from ckptsurgeon.formats.optimizers.entry import entry

MUON = (
    "momentum nesterov use_nesterov fp32_matmul_prec coefficient_type num_ns_steps scale_mode "
    "extra_scale_factor weight_decay_method use_decoupled_wd split_qkv"
)

ENTRIES = (
    # Transformer Engine scales moments of 8 and 16 bits; its state_dict has them unscaled.
    entry("FusedAdam", "apex; transformer_engine/pytorch/optimizers; deepspeed/ops/adam",
          "step exp_avg exp_avg_sq master_param=constant param=constant fp32_param=constant",
          "betas eps bias_correction"),
    entry("CPUAdam", "deepspeed/ops/adam/cpu_adam.py", "step exp_avg exp_avg_sq",
          "betas eps bias_correction amsgrad"),
    entry("Adam", "those that keep Adam's settings alone",
          "step exp_avg exp_avg_sq", "betas eps"),
    entry("Adam", "fairseq/optim/adam.py; metaseq/optim/adam.py",
          "step exp_avg exp_avg_sq", "betas eps amsgrad"),
    # The first of apex. With --fp16-adam-stats its moments are to be multiplied by what is saved.
    entry("FusedAdam", "fairseq/optim/fused_adam.py; metaseq/optim/fused_adam.py",
          "step exp_avg exp_avg_sq", "betas eps bias_correction max_grad_norm"),
    entry("FusedAdam of 16 bits", "fairseq/optim/fused_adam.py; metaseq/optim/fused_adam.py",
          "step exp_avg exp_avg_sq exp_avg_scale=1 exp_avg_sq_scale=1",
          "betas eps bias_correction max_grad_norm"),
    entry("FusedLamb", "deepspeed/ops/lamb/fused_lamb.py", "step exp_avg exp_avg_sq",
          "betas eps bias_correction max_grad_norm max_coeff min_coeff"),
    entry("Lamb", "train/lamb.py", "step exp_avg exp_avg_sq", "betas eps layer_adaptation"),
    entry("SGDW", "train/sgdw.py", "step momentum_buffer", "momentum"),
    entry("Lion", "deepspeed/ops/lion; emerging_optimizers/scalar_optimizers/lion.py",
          "step exp_avg exp_avg_sq param=constant fp32_param=constant", "betas"),
    entry("CPUAdagrad", "deepspeed/ops/adagrad/cpu_adagrad.py", "step exp_avg_sq", "eps amsgrad"),
    entry("Muon", "deepspeed/runtime/zero/muon/muon_optimizer.py",
          "step momentum_buffer exp_avg exp_avg_sq",
          "use_muon momentum betas eps ns_method bias_correction amsgrad"),
    entry("Muon", "emerging_optimizers/orthogonalized_optimizers",
          "step momentum_buffer param=constant fp32_param=constant", MUON),
    entry("AdaptiveMuon", "emerging_optimizers/orthogonalized_optimizers/adaptive_muon.py",
          "step momentum_buffer moment2_buffer param=constant fp32_param=constant",
          MUON + " beta2 eps moment2_method"),
    entry("SOAP", "emerging_optimizers/legacy_soap/soap.py",
          "step exp_avg exp_avg_sq L R Q_L=anew Q_R=anew eigvals_L eigvals_R "
          "param=constant fp32_param=constant",
          "betas eps shampoo_beta"),
    entry("SOAP", "nikhilvyas/SOAP soap.py", "step exp_avg exp_avg_sq GG=anew Q=anew",
          "betas eps shampoo_beta precondition_frequency max_precond_dim merge_dims "
          "precondition_1d normalize_grads correct_bias"),
    entry("Muon", "microsoft/dion dion/muon.py", "momentum",
          "mu beta1 beta2 epsilon nesterov adjust_lr algorithm flatten cautious_wd"),
    entry("Adafactor", "transformers/optimization.py",
          "step exp_avg exp_avg_sq_row exp_avg_sq_col exp_avg_sq RMS",
          "eps clip_threshold decay_rate beta1 scale_parameter relative_step warmup_init"),
    entry("ScheduleFree", "facebookresearch/schedule_free", "z=anew exp_avg_sq=anew",
          "betas momentum eps r warmup_steps train_mode weight_lr_power silent_sgd_phase",
          "k=0 weight_sum=0 lr_max=-1 scheduled_lr=0"),
    entry("Prodigy", "konstmish/prodigy prodigyopt/prodigy.py",
          "step s=anew p0=anew exp_avg=anew exp_avg_sq=anew",
          "betas beta3 eps d0 d_coef growth_rate use_bias_correction decouple "
          "safeguard_warmup fsdp_in_use slice_p",
          "d=<d0 d_max=<d0 d_hat=<d0 d_numerator=0 k=0"),
)  # fmt: skip
