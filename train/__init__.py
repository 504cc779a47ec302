"""A Megatron-style GPT pre-trainer on DeepSpeed and torch, small enough for a laptop CPU.

It saves real DeepSpeed checkpoints with Megatron-DeepSpeed's client state; on resume the
checkpoint wins over the config, and the first line it prints says what the live engine holds.

These are all the places that change an object of DeepSpeed at run time:

- distributed.start: `deepspeed.ops.__compatible_ops__`, so that no op is compiled on a CPU.
- optimizer, at its import: a filter on DeepSpeed's logger, which warns of every optimizer that is
  not on its list.
- optimizer.allow_fp16: `accelerator.is_fp16_supported`, for fp16 on a CPU that lacks it.
- optimizer.build_engine: the inner optimizer's state is cleared; the step that DeepSpeed takes at
  its start is not a step of the run.
- optimizer.without_prints: what DeepSpeed prints while it starts and loads is dropped.
- optimizer.set_clip_grad: the clipping norm, which ZeRO 0 and 3 do not restore.
- fused_step.fuse: the wrapper's `step` and, in fp32 without ZeRO, `engine.clip_fp32_gradients`: one
  pass over the gradients instead of five. DeepSpeed's own runs on a wrapper that we do not know.
- step.Step.settle, when gradients were not finite and only the device knew: `engine.skipped_steps`,
  `wrapper.overflow`, the inner optimizer's step counts and the schedule, back to before the step.
- wide_gradients.widen, for bf16 with gradients in fp32: `wrapper.update_hp_grads` and
  `engine.buffered_allreduce_fallback`, which took a call a parameter and two copies.
- step.Step, after `fuse`: the inner optimizer's `step` and `wrapper.overflow`, so that
  `skip_grad_norm` leaves a step out and the engine counts it.
- pipeline.train_batch: `engine._take_model_step`, anew for each batch: the stock one passes no
  arguments to the scheduler.
- universal.names_as_saved: `optimizer.param_names` while it loads; a pipeline names parameters by
  the number of their layer.
- universal.mend_zero_3: param groups and step counts after a load, which gives all groups those of
  the first.
- precision.masters_as_truth, for a load of another dtype: with ZeRO `engine._get_zero_ckpt_prefix`
  during it, the loss scaler and the weights after it; without, `wrapper.load_state_dict` during it.
- rewarm.rewarmed: the rate of each param group, for one step.
"""
