"""Names of all keys of SkyRL and LLaMA-Factory, so that a misspelt one is an error."""

from collections.abc import Mapping

_TRAINING_ARGUMENTS = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm
    label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
    liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy
    logging_steps logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only
    eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
    parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
    label_names train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug
    skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank sortish_sampler
    predict_with_generate generation_max_length generation_num_beams generation_config
    warmup_ratio logging_dir no_cuda use_mps_device jit_mode_eval use_ipex half_precision_backend fp16_opt_level
    fp16_backend group_by_length past_index adafactor push_to_hub_model_id push_to_hub_organization push_to_hub_token
    include_inputs_for_metrics include_tokens_per_second mp_parameters torchdynamo ray_scope fsdp_min_num_params
    fsdp_transformer_layer_cls_to_wrap tpu_num_cores tpu_metrics_debug use_legacy_prediction_loop save_safetensors
    per_gpu_train_batch_size per_gpu_eval_batch_size"""
"""Fields of `Seq2SeqTrainingArguments` of transformers 4.55 to 5.8, the versions that LLaMA-Factory supports."""
_LLAMA_FACTORY = """
    template dataset eval_dataset dataset_dir media_dir cutoff_len train_on_prompt mask_history streaming buffer_size
    mix_strategy interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples
    eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset packing neat_packing tool_format
    default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system freeze_trainable_layers
    freeze_trainable_modules freeze_extra_modules additional_target lora_alpha lora_dropout lora_rank lora_target
    loraplus_lr_ratio loraplus_lr_embedding use_rslora use_dora pissa_init pissa_iter pissa_convert create_new_adapter
    module_dropout oft_rank oft_block_size oft_target pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing
    kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
    ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model reward_model_adapters
    reward_model_quantization_bit reward_model_type ld_alpha use_galore galore_target galore_rank
    galore_update_interval galore_scale galore_proj_type galore_layerwise use_apollo apollo_target apollo_rank
    apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise
    apollo_scale_front use_badam badam_mode badam_start_block badam_switch_mode badam_switch_interval
    badam_update_ratio badam_mask_mode badam_verbose use_swanlab swanlab_project swanlab_workspace swanlab_run_name
    swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret pure_bf16 stage
    finetuning_type use_llama_pro use_adam_mini use_mca use_megatron_bridge megatron_bridge_args use_hyper_parallel
    hyper_parallel_args hyper_parallel_cp_size use_muon use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha
    freeze_vision_tower freeze_multi_modal_projector freeze_language_model compute_accuracy disable_shuffling
    early_stopping_steps plot_loss include_effective_tokens_per_second do_sample temperature top_p top_k num_beams
    max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens model_name_or_path
    adapter_name_or_path adapter_folder cache_dir use_fast_tokenizer resize_vocab split_special_tokens add_tokens
    add_special_tokens new_special_tokens_config init_special_tokens model_revision low_cpu_mem_usage rope_scaling
    flash_attn shift_attn mixture_of_depths use_unsloth use_unsloth_gc enable_liger_kernel moe_aux_loss_coef
    disable_gradient_checkpointing use_reentrant_gc upcast_layernorm upcast_lmhead_output train_from_scratch
    infer_backend offload_folder use_kv_cache use_v1_kernels infer_dtype hf_hub_token ms_hub_token om_hub_token
    print_param_status trust_remote_code quantization_method quantization_bit quantization_type double_quantization
    quantization_device_map image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels
    video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate export_dir export_size
    export_device export_quantization_bit export_quantization_dataset export_quantization_nsamples
    export_quantization_maxlen export_legacy_format export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager
    vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend
    use_kt kt_cpu_activation kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path kt_use_lora_experts
    kt_lora_expert_num kt_lora_expert_intermediate_size compute_dtype device_map model_max_length block_diag_attn
    ray_num_workers ray_init_kwargs master_addr master_port enable_torch_profiler profiler_output_dir
    profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes
    profiler_profile_memory profiler_with_stack profile_modules fp8 fp8_backend fp8_enable_fsdp_float8_all_gather
    overwrite_output_dir"""
"""LLaMA-Factory's own keys."""
LLAMA_FACTORY = frozenset(f"{_TRAINING_ARGUMENTS} {_LLAMA_FACTORY}".split())
"""Keys of a YAML file for `llamafactory-cli train`, in August 2026."""

_SKYRL: Mapping[str, str] = {
    "data": "train_data val_data",
    "data.dataloader": "num_workers persistent_workers",
    "trainer.placement": """
        colocate_all colocate_policy_ref policy_num_nodes policy_num_gpus_per_node critic_num_nodes
        critic_num_gpus_per_node ref_num_nodes ref_num_gpus_per_node""",
    "trainer": """
        use_expandable_segments sequence_parallel_backend strategy gradient_checkpointing
        gradient_checkpointing_use_reentrant seed resume_mode resume_path log_path ckpt_path max_ckpts_to_keep
        ckpt_interval hf_save_interval export_path bf16 epochs max_training_steps update_epochs_per_batch
        train_batch_size policy_mini_batch_size critic_mini_batch_size micro_train_batch_size_per_gpu
        micro_forward_batch_size_per_gpu max_tokens_per_microbatch recompute_old_logprobs_per_minibatch
        update_ref_every_epoch remove_microbatch_padding eval_batch_size eval_before_train eval_interval
        max_prompt_length flash_attn disable_fast_tokenizer project_name run_name logger enable_ray_gpu_monitor tags
        dump_data_batch dump_eval_results print_example_interval num_logger_eval_samples num_logger_train_samples
        log_example_interval logprobs_chunk_size vocab_entropy_chunk_size vocab_entropy_chunk_memory_mb
        fused_lm_head_logprob fused_lm_head_logprob_backend use_sample_packing""",
    "trainer.policy.model trainer.ref.model trainer.critic.model": "path",
    "trainer.policy.model.lora trainer.ref.model.lora trainer.critic.model.lora": """
        rank alpha dropout lora_sync_path target_modules exclude_modules init_method max_loras max_cpu_loras""",
    "trainer.policy.model.fake_int4_qat trainer.ref.model.fake_int4_qat trainer.critic.model.fake_int4_qat": """
        enabled group_size symmetric scale_divisor q_min bf16_base_path""",
    "trainer.policy.optimizer_config trainer.critic.optimizer_config": """
        lr adam_betas weight_decay max_grad_norm offload_after_step num_warmup_steps scheduler""",
    "trainer.policy.fsdp_config trainer.ref.fsdp_config trainer.critic.fsdp_config": """
        cpu_offload reshard_after_forward fsdp_size wrap_policy wrap_policy.""",
    "trainer.policy.fsdp_config.mixed_precision trainer.ref.fsdp_config.mixed_precision": """
        param_dtype reduce_dtype buffer_dtype""",
    "trainer.critic.fsdp_config.mixed_precision": "param_dtype reduce_dtype buffer_dtype",
    "trainer.policy": """
        sequence_parallel_size use_torch_compile record_memory language_model_only inference_only_init
        model_config_kwargs model_config_kwargs.""",
    "trainer.policy.torch_profiler_config": """
        enable ranks save_path skip_first wait warmup active repeat activities record_shapes profile_memory
        with_stack with_flops with_modules export_type""",
    "trainer.policy.megatron_config trainer.ref.megatron_config": """
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size moe_token_dispatcher_type moe_router_load_balancing_type moe_aux_loss_coeff
        moe_grouped_gemm moe_router_score_function moe_router_enable_expert_bias moe_enable_routing_replay
        moe_per_layer_logging moe_router_dtype empty_cuda_cache dist_ckpt_optim_fully_reshardable freeze_moe_router
        mtp_num_layers mtp_loss_weight mtp_loss_chunk_size mtp_loss_topk async_dist_ckpt_save
        async_dist_ckpt_strategy async_save_prestage_to_cpu optimizer_config_kwargs optimizer_config_kwargs.
        transformer_config_kwargs transformer_config_kwargs. model_config_kwargs model_config_kwargs.""",
    "trainer.policy.megatron_config.ddp_config trainer.ref.megatron_config.ddp_config": """
        grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather average_in_collective""",
    "trainer.policy.megatron_config.hf_export_config trainer.ref.megatron_config.hf_export_config": """
        distributed_save save_every_n_ranks""",
    "trainer.policy.megatron_config.lora_config trainer.ref.megatron_config.lora_config": "lora_type merge_lora",
    "trainer.ref": "sequence_parallel_size language_model_only model_config_kwargs model_config_kwargs.",
    "trainer.critic": "sequence_parallel_size model_config_kwargs model_config_kwargs.",
    "trainer.algorithm": """
        advantage_estimator kl_estimator_type use_kl_in_reward use_kl_loss kl_loss_coef use_entropy_loss
        entropy_loss_coef temperature advantage_batch_normalize value_head_prefix policy_loss_type loss_reduction
        grpo_norm_by_std zero_variance_filter zero_variance_filter_tol lambd gamma eps_clip_low eps_clip_high
        clip_ratio_c tis_imp_ratio_cap use_tis value_clip max_seq_len""",
    "trainer.algorithm.kl_ctrl": "type kl_target horizon",
    "trainer.algorithm.off_policy_correction": """
        tis_ratio_type token_tis_ratio_clip_high sequence_tis_ratio_clip_high sequence_mask_metric geo_mask_high
        geo_mask_low product_mask_high product_mask_low outlier_token_is_threshold_low
        outlier_token_is_threshold_high token_mask_is_threshold_low token_mask_is_threshold_high""",
    "trainer.algorithm.sapo": "tau_pos tau_neg",
    "trainer.algorithm.dynamic_sampling": "type max_sample_batches min_replace_ratio",
    "trainer.algorithm.clip_cov": "clip_ratio clip_cov_lb clip_cov_ub",
    "trainer.algorithm.kl_cov": "kl_cov_frac ppo_kl_coef",
    "trainer.algorithm.cispo": "cispo_eps_clip_low cispo_eps_clip_high cispo_anchor",
    "trainer.algorithm.dppo": "dppo_type delta_low delta_high",
    "trainer.mtp": "enabled num_speculative_tokens loss_weight",
    "trainer.fully_async": """
        enabled max_staleness_steps num_parallel_generation_workers sample_full_batch clear_kv_cache_on_weight_sync
        simulate_training simulate_training_step_seconds simulate_weight_sync_seconds""",
    "generator.inference_engine": """
        model_dtype run_engines_locally num_engines backend weight_sync_backend
        weight_transfer_threshold_cuda_ipc_GB tensor_parallel_size pipeline_parallel_size expert_parallel_size
        data_parallel_size vllm_v1_disable_multiproc enable_prefix_caching enable_chunked_prefill
        enable_return_routed_experts max_num_batched_tokens enforce_eager fully_sharded_loras
        enable_ray_prometheus_stats gpu_memory_utilization offload_kv_for_weight_sync use_expandable_segments
        max_num_seqs served_model_name distributed_executor_backend language_model_only external_proxy_url
        external_server_urls enable_pd num_prefill engine_init_kwargs engine_init_kwargs. speculative_config
        speculative_config. router_init_kwargs router_init_kwargs. async_engine""",
    "generator.inference_engine.delta_weight_sync": """
        sync_dir local_checkpoint_dir publish_staging_dir max_file_size_in_gb cloud_download_workers
        publish_num_workers checkpoint_load_format multi_thread_safetensors_max_workers""",
    "generator": """
        n_samples_per_prompt batched max_turns max_input_length use_conversation_multi_turn
        append_eos_token_after_stop_str_in_multi_turn eval_n_samples_per_prompt zero_reward_on_non_stop
        use_cache_salt apply_overlong_filtering step_wise_trajectories vision_language_generator
        merge_stepwise_output chat_template_kwargs chat_template_kwargs.""",
    "generator.chat_template": "source name_or_path",
    "generator.sampling_params generator.eval_sampling_params": """
        max_generate_length repetition_penalty temperature top_p min_p top_k logprobs stop additional_kwargs
        additional_kwargs.""",
    "environment": "env_class",
    "environment.skyrl_gym": "max_env_workers",
    "environment.skyrl_gym.text2sql": "db_path",
    "environment.skyrl_gym.llm_as_a_judge": "model base_url",
    "environment.skyrl_gym.search": "log_requests search_url topk timeout",
}  # fmt: skip
"""Sections, with spaces between those that have the same keys, and the keys in them."""
SKYRL = frozenset(
    f"{section}.{name}" for sections, names in _SKYRL.items() for section in sections.split() for name in names.split()
)
"""Keys of SkyRL's config in August 2026. One that ends in a dot is a mapping with any keys."""
