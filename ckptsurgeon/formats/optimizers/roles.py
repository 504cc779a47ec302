"""What each key of an optimizer's state is, in the words of docs/optimizers.md and of refusals."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

WORDS = {
    "count of updates": "step k n_iter func_evals",
    "first moment": "exp_avg m m_avg mug avg_grad exp_avg_grad grad_ma moments mov_avg_grad "
    "grad_avg exp_avg2 exp_avg_slow exp_avg_c exp_avg_r",
    "second moment": "exp_avg_sq v v_avg exp_avg_var square_avg variance variance_ma sum v_mean "
    "exp_inf exp_hessian_diag_sq hessian_moment fim grad_sum_sq b bg bhg v_k moment2_buffer "
    "second_momentum_buffer grads_ema",
    "largest second moment": "max_exp_avg_sq max_variance_ma",
    "momentum": "momentum momentum_buffer pos_momentum neg_momentum neg_exp_avg neg_grad_ma "
    "grad_buffer i_buffer d_buffer delta d update noisy_gradient",
    "factor of a second moment": "row_var col_var exp_avg_sq_row exp_avg_sq_col exp_avg_res_row "
    "exp_avg_res_col v_avg_0 v_avg_1 m_avg_c m_avg_r m_avg_u accumulator_0 accumulator_1 s q r p",
    "Kronecker factor": "GG L R Q pre_cond_0 pre_cond_1 sides blocks pre_conditioner",
    "eigenbasis or inverse root": "Q_L Q_R U projector inv_pre_cond_0 inv_pre_cond_1 q_sides "
    "eigvals_L eigvals_R",
    "curvature": "hessian approx_hessian H_diag",
    "average of the weights": "z ax x_k lookahead_params slow_buffer ema pbar mov_avg_param",
    "weights": "p0 x0 prev_param param fp32_param master_param",
    "earlier gradient": "previous_grad last_grad prev prev_flat_grad grad_queue exp_avg_diff "
    "grok_exp_avg old_dirs old_stps ro al t",
    "average of the updates": "acc_delta exp_avg_lr exp_avg_lr_1 exp_avg_lr_2 num_sum den_sum",
    "rate or product of rates": "mu mu_product eta alpha_k step_size beta1_prod beta1_weight "
    "beta2_weight decay sk",
    "norm": "RMS gamma scale gsnr theta phi exp_grad_norm m_max_t m_norm_t v_norm_t adam_norm "
    "weight_norm trust_ratio gnorm_vec unorm_vec graft",
    "sum of squares": "n",
    "loss seen": "prev_loss short medium long",
    "what rounding left": "kahan_comp",
    "code": "state1 state2 exp_avg::quantized exp_avg_sq::quantized",
    "scale of codes": "absmax1 absmax2 max1 max2 new_max1 new_max2 exp_avg::scales "
    "exp_avg_sq::scales exp_avg_scale exp_avg_sq_scale",
    "code book": "qmap1 qmap2",
    "shape of the state": "dimension reduced shape one_sided expressions mask "
    "precondition_frequency shampoo_beta",
}

ROLES: Mapping[str, str] = MappingProxyType(
    {key: role for role, keys in WORDS.items() for key in keys.split()}
)
"""Key of a state → its role, in one optimizer or another."""
