"""TRL's arguments that are not translated: why each has no meaning here, and which are refused where they are on."""

from collections.abc import Mapping

LOGGING = "each step is in the run's metrics.jsonl, whatever TRL would log"
COMPLETIONS = "completions of each step are in the run's folder: atomrl rollouts"
LOADING = "how rows are loaded; the rows are the same"
KERNEL = "how it is computed, not what; AtomRL has kernels of its own"
SHARDS = "how processes share the model: section backend (docs/guides/multi_gpu.md)"
SERVER = "of TRL's vLLM; section rollout says where completions are drawn"
UPLOAD = "nothing is uploaded: atomrl export, then huggingface-cli upload"
SAVING = "checkpoints hold model, optimizer and progress (docs/guides/checkpoints.md)"
EVALUATION = "evaluation computes as section eval says"
REFERENCE = "of sync_ref_model, which is off"
ENTROPY = "of use_adaptive_entropy, which is off"
DROPOUT = "a model's own dropout is always off here"
PADDING = "rows lie end to end, without padding"


def _of(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


WITHOUT_MEANING: Mapping[str, str] = {
    **_of(LOGGING, """
        logging_steps logging_first_step logging_strategy logging_dir logging_nan_inf_filter log_level log_level_replica
        log_on_each_node disable_tqdm include_num_input_tokens_seen include_tokens_per_second project trackio_space_id
        trackio_bucket_id trackio_static_space_id skip_memory_metrics debug"""),
    **_of(COMPLETIONS, """
        log_completions num_completions_to_print log_unique_prompts wandb_log_unique_prompts log_multimodal"""),
    **_of(LOADING, """
        dataset_num_proc dataset_kwargs dataset_streaming dataloader_drop_last dataloader_num_workers
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order
        dataloader_multiprocessing_context remove_unused_columns label_names group_by_length length_column_name
        train_sampling_strategy ignore_data_skip"""),
    **_of(KERNEL, """
        tf32 torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config
        attn_implementation torch_empty_cache_steps gradient_checkpointing_kwargs use_cache low_cpu_mem_usage device_map
        jit_mode_eval cache_implementation auto_find_batch_size use_transformers_continuous_batching
        bnb_4bit_quant_storage
        bnb_4bit_compute_dtype transformers_continuous_batching_config use_transformers_paged full_determinism"""),
    **_of(SHARDS, """
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp
        fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap deepspeed accelerator_config
        parallelism_config
        local_rank ds3_gather_for_generation accelerate_config average_tokens_across_devices ignore_bias_buffers"""),
    **_of(SERVER, """
        vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_group_port vllm_tensor_parallel_size vllm_max_model_length vllm_enable_sleep_mode"""),
    **_of(UPLOAD, """
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
        log_completions_hub_repo"""),
    **_of(SAVING, """
        save_only_model save_on_each_node save_safetensors overwrite_output_dir enable_jit_checkpoint
        restore_callback_states_from_checkpoint"""),
    **_of(EVALUATION, """
        per_device_eval_batch_size eval_accumulation_steps eval_delay eval_do_concat_batches eval_use_gather_object
        batch_eval_metrics prediction_loss_only include_for_metrics do_train do_eval do_predict bf16_full_eval
        fp16_full_eval eval_packing"""),
    **_of(REFERENCE, "ref_model_mixup_alpha ref_model_sync_steps"),
    **_of(ENTROPY, "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"),
    **_of(DROPOUT, "disable_dropout"),
    **_of(PADDING, "pad_token pad_to_multiple_of padding_free packing_strategy pad_token_id"),
    **_of("of loss_type=vespo, which is off", "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg"),
    **_of("the reference's log-probs are computed in each step; they are the same numbers",
          "precompute_ref_log_probs precompute_ref_batch_size"),
    **_of("checkpoint.keep_best keeps the best one, by a metric of its name here",
          "load_best_model_at_end metric_for_best_model greater_is_better"),
    "use_bnb_nested_quant": "the scales of the 4 bits are not quantised again, which is more exact",
    "bnb_4bit_use_double_quant": "the scales of the 4 bits are not quantised again, which is more exact",
    "test_split_size": "rows are not split here: name those that are held out in data.eval",
    "streaming": LOADING,
    "resume_from_checkpoint": "a run goes on with --resume",
    "eos_token": "a turn ends with the token that the chat template writes behind it",
    "data_seed": "seed decides the order of the rows too",
    "lora_task_type": "of peft's class, not of the adapters",
    "task_type": "of peft's class, not of the adapters",
    "inference_mode": "of peft's class, not of the adapters",
    "router_aux_loss_coef": "the loss that balances a mixture's experts is not computed; other models have none",
    "max_tool_calling_iterations": "without tools nothing is called",
    "cast_lm_head_to_fp32": "the output matrix computes in model.dtype; log-probs are float32",
    "sapo_temperature_neg": "of loss_type=sapo, which is off",
    "sapo_temperature_pos": "of loss_type=sapo, which is off",
}  # fmt: skip
"""Arguments that say nothing of what is trained, each with the reason."""

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "min_p": ((None, 0, 0.0), "completions are drawn by temperature, top_p and top_k"),
    "repetition_penalty": ((None, 1, 1.0), "completions are drawn from the model as it is"),
    "vllm_structured_outputs_regex": ((None,), "completions are drawn from the model as it is"),
    "vllm_guided_decoding_regex": ((None,), "completions are drawn from the model as it is"),
    "use_adaptive_entropy": ((None, False), "the coefficient of the entropy stays as it is here"),
    "sync_ref_model": ((None, False), "the reference model stays as it is here"),
    "use_bias_correction_kl": ((None, False), "algorithm.kl.k2_gradient mends the same bias in another way"),
    "neftune_noise_alpha": ((None, 0, 0.0), "embeddings get no noise here"),
    "label_smoothing_factor": ((None, 0, 0.0), "the likelihood has no smoothing here"),
    "optim_args": ((None,), "AdamW is set by train.adam_*"),
    "optim_target_modules": ((None,), "all trained weights have one optimizer"),
    "use_dora": ((None, False), "adapters are plain LoRA"),
    "lora_modules_to_save": ((None, [], ["score"]), "beside the adapters nothing is trained"),
    "lora_target_parameters": ((None, []), "adapters are on linear layers"),
    "lora_bias": ((None, "none"), "beside the adapters nothing is trained"),
    "layers_to_transform": ((None,), "adapters are on all layers: name them by model.lora.target_modules"),
    "rank_pattern": ((None, {}), "all adapters have one rank"),
    "alpha_pattern": ((None, {}), "all adapters have one scale"),
    "init_lora_weights": ((None, True), "adapters begin at zero"),
    "bnb_4bit_quant_type": ((None, "nf4"), "4 bits are nf4 here"),
    "model_revision": ((None, "main"), "download that revision and name its folder in model.path"),
    "revision": ((None, "main"), "download that revision and name its folder in model.path"),
}
"""Arguments that decide what is trained and have no counterpart: the values with which they are off, and the reason."""
