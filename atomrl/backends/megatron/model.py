"""The model of a Megatron rank: one pipeline stage of a decoder, its tensor-parallel part."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atomrl.atoms.logprobs import row_logprobs
from atomrl.backends.megatron.balance import Balance
from atomrl.backends.megatron.layout import LOW_RANK, WHOLE, Key, cut_all, cut_along, layer_names, padded_vocabulary
from atomrl.backends.megatron.lora import Adapters
from atomrl.backends.megatron.shapes import Experts, dense, read_shape
from atomrl.backends.vocabulary_parallel import parallel_row_logprobs, whole_rows
from atomrl.batches import RowBatch
from atomrl.common.devices import to_device
from atomrl.config import MegatronConfig
from atomrl.models.attention import attend
from atomrl.models.decoder_spec import DecoderSpec, rope_frequencies
from atomrl.models.scalar import scored_lengths
from atomrl.models.stream import Stream, make_stream, row_stream
from atomrl.protocols import Adapter, Distributions, Output

LOCAL_EXPERTS = "mlp.experts.local_experts."


class Norm(nn.Module):
    """RMSNorm with Megatron's constructor, because Megatron rejects PyTorch's in sequence-parallel models."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron asks for it

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class StreamAttention(nn.Module):
    """Attention over a stream of rows, instead of Megatron's own, which materializes all scores."""

    def __init__(self, **unused: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, stream: Stream, **unused: Any) -> Tensor:
        """[N, 1, heads, D], and keys and values [N, 1, kv_heads, D] -> [N, 1, heads * D]; 0 in the padding of N."""
        q, k, v = (part[: len(stream.source), 0] for part in (query, key, value))
        if q.is_cuda and stream.spans is None:  # in float32, only SDPA's kernel for equal heads saves memory
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        mixed = attend(q, k, v, stream.blocks, stream.spans).flatten(1)
        return F.pad(mixed, (0, 0, 0, len(query) - len(mixed)))[:, None]


class Rotary(nn.Module):
    """Rotary position embeddings in Megatron's layout."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        frequencies, _ = rope_frequencies(config)
        self.frequencies = torch.cat([frequencies, frequencies])

    def forward(self, positions: Tensor) -> Tensor:
        """[N] -> [N, 1, 1, D] float32."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        return torch.outer(positions, self.frequencies)[:, None, None]


class Stage(nn.Module):
    """The layers of a pipeline stage: a tensor-parallel rank's part.

    Args:
        config: transformers config of the model.
        parts: this rank's weights, from `stage_weights`.
        scalar: a critic or reward model, whose output is one number per token instead of logits.
        settings: config section `backend`.
        device: device of this rank.
        dtype: dtype of weights and computation.
        checkpointing: turn on gradient checkpointing.
        packed: pack rows end to end and compute shared prompts once; False: padded rows.
        adapted: adapters by the Hugging Face name of the weight that they add to; then only they are trained.
        dropout: dropout probability of the adapters' inputs.
    """

    def __init__(
        self,
        config: Any,
        parts: Mapping[Key, Tensor],
        scalar: bool,
        settings: MegatronConfig,
        device: torch.device,
        dtype: torch.dtype,
        checkpointing: bool,
        packed: bool,
        adapted: Mapping[str, Adapter],
        dropout: float,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel

        super().__init__()
        self.spec, experts = read_shape(config)
        self.tensor, self.scalar, self.shares_prompts, self.device = settings.tensor, scalar, packed, device
        self.pad_token_id = config.pad_token_id
        self.first, self.last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        self.group, self.rank = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        self.config = shape = transformer_config(self.spec, experts, settings, device, dtype)
        self.module: Any = GPTModel(
            config=shape,
            transformer_layer_spec=layer_specs(shape),
            vocab_size=padded_vocabulary(self.spec.vocab, settings.tensor),
            max_sequence_length=self.spec.max_positions,
            pre_process=self.first,
            post_process=self.last,
            share_embeddings_and_output_weights=self.spec.tied_head and not scalar,
            position_embedding_type="none",
        )
        self.rotary = Rotary(dense(config))
        self.balance = Balance(self.module.decoder.layers, self.spec.layers, experts.count) if experts else None
        self.adapters = Adapters(self.module.decoder.layers, self.spec, adapted, dropout, self.group, device)
        if checkpointing:  # PyTorch's, because Megatron's random states are not used
            recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=dropout > 0)
            for layer in self.module.decoder.layers:
                layer.forward = partial(recompute, layer.forward)
        if scalar and self.last:
            self.module.output_layer = None
            self.score = nn.Linear(self.spec.hidden, 1, bias=False, dtype=dtype, device=device)
        self._load(parts)
        if adapted:
            own = set(self.trained_weights().values())
            for weight in self.parameters():
                weight.requires_grad_(weight in own)

    def trained_weights(self) -> Mapping[Key, nn.Parameter]:
        """Return this rank's weights that a trained model trains: only adapters, if it has any."""
        weights = self.named_weights()
        return {key: weight for key, weight in weights.items() if LOW_RANK.fullmatch(key[0])} or weights

    def named_weights(self) -> Mapping[Key, nn.Parameter]:
        """Return this rank's weights by `Key`."""
        weights: dict[Key, nn.Parameter] = {}
        for name, weight in self.named_parameters():
            name = name.removeprefix("module.")
            if not name.startswith("decoder.layers."):
                weights[name, None] = weight
                continue
            local, _, name = name.removeprefix("decoder.layers.").partition(".")
            layer = self.module.decoder.layers[int(local)]
            if name.startswith(LOCAL_EXPERTS):
                number, _, rest = name.removeprefix(LOCAL_EXPERTS).partition(".")
                name = f"mlp.experts.{layer.mlp.local_expert_indices[int(number)]}.{rest}"
            weights[name, layer.layer_number - 1] = weight
        return weights

    def repeats(self, key: Key) -> bool:
        """Return True for the last stage's copy of a tied embedding."""
        return key[0] == "output_layer.weight" and self.spec.tied_head

    @torch.no_grad()
    def _load(self, parts: Mapping[Key, Tensor]) -> None:
        for (name, layer), weight in self.named_weights().items():
            weight.copy_(parts[name, layer])
            # Attributes that Megatron sets when it initializes weights. Its gradient norm counts weights without
            # `tensor_model_parallel` on one rank only.
            parameter: Any = weight
            along = cut_along(name)
            parameter.tensor_model_parallel = along is not None
            parameter.partition_dim, parameter.partition_stride = along or 0, 1

    def stream(self, micro: RowBatch, wanted: Collection[Output]) -> Stream:
        """Lay out the tokens to compute of a micro-batch with one more column of padding, [B, T + 1].

        `before` are the tokens before masked ones; for `scores`, the last scored token of each row.

        Args:
            micro: rows on the CPU, here and in `forward` and `outputs`.
        """
        tokens, after, prompts = F.pad(micro.tokens, (0, 1)), F.pad(micro.loss_mask, (0, 1)), micro.prompt_lengths
        if "scores" in wanted:
            lengths = scored_lengths(micro.tokens, micro.lengths, self.pad_token_id)
            after = F.one_hot(lengths, tokens.shape[1]).bool()
        if "scores" in wanted or self.balance is not None:  # no shared prompts: `Balance` counts the tokens of all rows
            prompts = torch.zeros_like(prompts)
        after[:, 0] = False
        if self.shares_prompts and after.any():
            return make_stream(tokens, after, prompts).to(self.device)
        rows, before = row_stream(*tokens.shape), after.flatten().nonzero()[:, 0] - 1
        source, positions, before = (to_device(part, self.device) for part in (rows.source, rows.positions, before))
        return Stream(source, positions, before, rows.blocks)

    def forward(self, micro: RowBatch, stream: Stream) -> Tensor:
        """Return hidden states [N, 1, H] of this rank's part of the tokens; on the last stage after the final norm."""
        gpt, padding = self.module, (0, -len(stream.source) % self.tensor)
        if self.balance is not None:
            self.balance.begin(micro, stream, padding, self.rank, self.tensor)
        tokens = F.pad(to_device(F.pad(micro.tokens, (0, 1)), self.device).flatten()[stream.source], padding)
        x = gpt.embedding(input_ids=tokens[None], position_ids=None) if self.first else None
        angles = self.rotary(F.pad(stream.positions, padding))
        states: Tensor = gpt.decoder(hidden_states=x, attention_mask=stream, rotary_pos_emb=angles)
        if self.balance is not None:
            self.balance.end()
        return states

    def outputs(
        self, states: Tensor, micro: RowBatch, stream: Stream, wanted: Collection[Output], temperature: float
    ) -> dict[Output, Any]:
        """Compute outputs from the last stage's states; the same on all tensor-parallel ranks."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if self.tensor > 1:  # every rank has the full gradient of all states, and continues with its part
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        before = states[:, 0].index_select(0, stream.before)
        if "scores" in wanted:
            return {"scores": self._scalars(before, micro.lengths > 0)}
        outputs: dict[Output, Any] = {}
        mask = micro.loss_mask.clone()
        mask[:, 0] = False
        if "values" in wanted:
            outputs["values"] = self._scalars(before, mask)
        if "logprobs" in wanted or "entropy" in wanted:
            logprobs, entropy = self._logprobs(before, micro, mask, temperature, "entropy" in wanted)
            outputs["logprobs"] = logprobs
            if entropy is not None:
                outputs["entropy"] = entropy
        if {"distributions", "squared_probs"} & set(wanted):
            places = to_device(mask.flatten().nonzero()[:, 0], self.device)
            made = Distributions(before, self._full_head(), places, temperature)
            outputs["distributions"] = made
            if "squared_probs" in wanted:
                outputs["squared_probs"] = made.squared_probs(mask)
        return outputs

    def _scalars(self, states: Tensor, where: Tensor) -> Tensor:
        """Apply the score head to states [n, H] and scatter to the n True places of `where`; float32, 0 elsewhere."""
        scalars: Tensor = self.score(states)[:, 0].float()
        places = to_device(where.flatten().nonzero()[:, 0], self.device)
        return scalars.new_zeros(where.numel()).index_copy(0, places, scalars).view(where.shape)

    def _logprobs(
        self, before: Tensor, micro: RowBatch, mask: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        if (candidates := micro.rollout.candidates) is not None:
            lists = candidates.ids, candidates.counts
            return row_logprobs(before, self._full_head(), micro.tokens, mask, temperature, None, entropy, *lists)
        first = self.rank * padded_vocabulary(self.spec.vocab, self.tensor) // self.tensor
        own = self._head()[: self.spec.vocab - first]  # without the padding of the last rank
        return parallel_row_logprobs(before, own, micro.tokens, mask, first, temperature, self.group, entropy)

    def _head(self) -> Tensor:
        """Return this rank's rows of the output matrix."""
        tied = self.spec.tied_head
        weight: Tensor = self.module.shared_embedding_or_output_weight() if tied else self.module.output_layer.weight
        return weight

    def _full_head(self) -> Tensor:
        return whole_rows(self._head(), self.group)[: self.spec.vocab]


def stage_weights(config: Any, weights: Mapping[str, Tensor], settings: MegatronConfig) -> dict[Key, Tensor]:
    """Copy this rank's parts of a full model's weights, so that the full model can be freed.

    Args:
        config: transformers config of the model.
        weights: full weights by Hugging Face name, with adapters.
        settings: config section `backend`.
    """
    from megatron.core import parallel_state

    spec, experts = read_shape(config)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    rank, stage = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    share = parallel_state.get_expert_model_parallel_rank()
    layers, own = spec.layers // settings.pipeline, experts.count // settings.expert if experts else 0
    keys: list[Key] = [("embedding.word_embeddings.weight", None)] if first else []
    if last:
        keys += [(name, None) for name in WHOLE]
    if last and not (first and spec.tied_head):
        keys.append(("output_layer.weight", None))
    names = layer_names(range(share * own, (share + 1) * own))
    keys += [(name, layer) for layer in range(stage * layers, (stage + 1) * layers) for name in names]
    return cut_all(keys, weights, spec, rank, settings.tensor)


def transformer_config(
    spec: DecoderSpec, experts: Experts | None, settings: MegatronConfig, device: torch.device, dtype: torch.dtype
) -> Any:
    """Create Megatron's config of a model."""
    from megatron.core.transformer import TransformerConfig

    mixture: dict[str, Any] = {}
    if experts is not None:
        mixture = {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.chosen,
            "moe_ffn_hidden_size": experts.width,
            "moe_router_pre_softmax": not experts.renormalised,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": settings.expert,
        }
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.intermediate,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        layernorm_epsilon=spec.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings.tensor,
        pipeline_model_parallel_size=settings.pipeline,
        sequence_parallel=settings.tensor > 1,
        expert_tensor_parallel_size=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one that Megatron accepts with variable lengths
        calculate_per_token_loss=True,  # gradients are sums: no division by micro-batches or ranks
        batch_p2p_sync=False,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        **mixture,
    )


def layer_specs(config: Any) -> Any:
    """Return the specs of Megatron's layers, with attention and norms that need neither Transformer Engine nor Apex."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = get_gpt_layer_local_spec(config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = StreamAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)
