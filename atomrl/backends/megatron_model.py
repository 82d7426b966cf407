"""The model of a Megatron rank: one pipeline stage of a decoder, its tensor-parallel part.

Also the number of tokens per expert, low-rank adapters on Megatron's layers, and a way to run Megatron on CPUs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from atomrl.atoms.logprobs import row_logprobs
from atomrl.backends.megatron_layout import (
    BY_COLUMNS,
    LOW_RANK,
    MIXTURE,
    SEVERAL,
    WHOLE,
    Experts,
    Key,
    cut_all,
    cut_along,
    dense,
    layer_names,
    padded_vocabulary,
    published_names,
    read_shape,
)
from atomrl.backends.vocabulary_parallel import parallel_row_logprobs, whole_rows
from atomrl.batches import RowBatch
from atomrl.common.devices import to_device
from atomrl.common.metrics import Mean, Metrics
from atomrl.config import ConfigError, MegatronConfig, ModelConfig
from atomrl.models.attention import Stream, attend, make_stream, row_stream
from atomrl.models.gpt import DecoderSpec, rope_frequencies
from atomrl.models.loading import model_config_only
from atomrl.models.reward_model import scored_lengths
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
        if "distributions" in wanted:
            places = to_device(mask.flatten().nonzero()[:, 0], self.device)
            outputs["distributions"] = Distributions(before, self._full_head(), places, temperature)
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


# --------------------------------------------------------------------------------------------------------------------
# Load balance of experts.

Routing = Callable[..., tuple[Tensor, Tensor]]


def _logits(router: Any, x: Tensor) -> Tensor:
    """Router logits in float32. Megatron's own code for this fails without Transformer Engine."""
    return F.linear(x.float(), router.weight.float())


class Balance:
    """Counts the tokens of each expert in the layers of a stage.

    Counted are tokens that the loss depends on: those of a row up to its last masked one. Prompts are not shared with
    experts, so the counts do not depend on the split into micro-batches.

    Args:
        layers: Megatron's layers of this stage.
        total: number of layers of the full model.
        experts: number of experts per layer.
    """

    def __init__(self, layers: Sequence[Any], total: int, experts: int) -> None:
        self._sums = torch.zeros(total, 2, experts, device=layers[0].mlp.router.weight.device)
        self._counted: Tensor | None = None
        for layer in layers:
            router = layer.mlp.router
            router.gating = partial(_logits, router)
            router.routing = partial(self._route, router.routing, layer.layer_number - 1)

    def begin(self, micro: RowBatch, stream: Stream, padding: tuple[int, int], rank: int, tensor: int) -> None:
        """Start counting this tensor-parallel rank's tokens of a stream; only in passes with gradient."""
        if not torch.is_grad_enabled():
            return
        width = micro.tokens.shape[1]
        ends = to_device((micro.loss_mask * torch.arange(width)).amax(1), stream.positions.device)
        counted = stream.positions < ends[stream.source // (width + 1)]
        self._counted = F.pad(counted, padding).chunk(tensor)[rank].float()

    def end(self) -> None:
        """Stop counting, because checkpointed layers are recomputed in the backward pass."""
        self._counted = None

    def _route(self, routing: Routing, layer: int, logits: Tensor, **named: Any) -> Any:
        probs, chosen = routing(logits, **named)
        if self._counted is not None:
            wanted = logits.detach().view(chosen.shape).float().softmax(-1)
            self._sums[layer] += torch.stack([self._counted @ chosen.float(), self._counted @ wanted])
        return probs, chosen

    def metrics(self) -> Metrics:
        """Return metrics of all ranks since the last call, averaged over layers. Collective.

        With f_e the share of tokens routed to expert e, p_e its mean router probability, and E experts:

            moe/load_balancing_loss = E sum_e f_e p_e                     1: balanced (Switch Transformer)
            moe/max_load            = E max_e f_e                         1: balanced
            moe/idle_experts        = share of experts without a token
        """
        dist.all_reduce(self._sums)
        chosen, wanted = self._sums.unbind(1)
        f, p = (sums / sums.sum(1, keepdim=True).clamp(min=1e-9) for sums in (chosen, wanted))
        experts = chosen.shape[1]
        metrics: Metrics = {
            "moe/load_balancing_loss": Mean((f * p).sum(1).mean() * experts),
            "moe/max_load": Mean(f.amax(1).mean() * experts),
            "moe/idle_experts": Mean((chosen == 0).float().mean()),
        }
        self._sums.zero_()
        return metrics


# --------------------------------------------------------------------------------------------------------------------
# Low-rank adapters on Megatron's layers: W + scale B A, with only A and B trained.
#
# Megatron fuses several matrices in one layer; each has its own adapter, as in peft. Of a column-parallel layer, B is
# sharded along its rows and A is replicated; of a row-parallel one, A is sharded along its columns and B is replicated.
# So ranks exchange tensors of the adapter's rank only.

Linear = Callable[[Tensor], tuple[Tensor, Tensor | None]]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_adapters(model: ModelConfig) -> None:
    """Raise ConfigError if the config has adapters that Megatron's layers do not support."""
    if model.lora is None:
        return
    modules = model.lora.target_modules
    targets = [] if modules == "all-linear" else [modules] if isinstance(modules, str) else modules
    if others := [name for name in targets if name.rpartition(".")[2] not in PROJECTIONS]:
        raise ConfigError(
            f"model.lora.target_modules: {', '.join(others)}: on Megatron adapters are supported on "
            f"{', '.join(PROJECTIONS)}; use those, or backend.type=fsdp"
        )
    if model.quantization is not None:
        raise ConfigError("model.quantization: Megatron's layers are not quantised; leave it out, or use fsdp")
    path = model.path
    if path is not None and model_config_only(path, model.trust_remote_code).model_type == MIXTURE:
        raise ConfigError(f"model.lora: {path} has experts, which do not support adapters on Megatron; use fsdp")


class LowRank(nn.Module):
    """A tensor-parallel rank's part of the adapter of one matrix.

    Args:
        adapter: the full adapter.
        by_columns: the layer is row-parallel (sharded along its inputs); False: column-parallel.
        dropout: dropout probability of the adapter's input.
        tensor: tensor-parallel size.
    """

    def __init__(self, adapter: Adapter, by_columns: bool, dropout: float, tensor: int, device: torch.device) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        inputs, outputs = adapter.a.shape[1], len(adapter.b)
        shapes = (inputs // tensor, outputs) if by_columns else (inputs, outputs // tensor)
        self.scale = adapter.scale
        self.lora_A = nn.Parameter(torch.empty(len(adapter.a), shapes[0], device=device))
        self.lora_B = nn.Parameter(torch.empty(shapes[1], len(adapter.a), device=device))
        replicated: Any = self.lora_B if by_columns else self.lora_A
        replicated.sequence_parallel = tensor > 1  # Megatron sums the gradients of the ranks' tokens


class Adapters:
    """Adds the adapters of a stage to its layers; weights are loaded later, with those of the layers.

    Args:
        layers: Megatron's layers of this stage.
        spec: spec of the model.
        adapted: full adapters by the Hugging Face name of the weight that they add to.
        dropout: dropout probability of the adapters' inputs.
        group: tensor-parallel process group.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        spec: DecoderSpec,
        adapted: Mapping[str, Adapter],
        dropout: float,
        group: Any,
        device: torch.device,
    ) -> None:
        self.spec, self.dropout, self.group, self.tensor, self._on = spec, dropout, group, group.size(), True
        modules = [*SEVERAL, *(name.removesuffix(".weight") for name in BY_COLUMNS)]
        for layer in layers if adapted else ():
            for module in modules:
                self._add(layer.get_submodule(module), module, layer.layer_number - 1, adapted, device)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters inside the block, which gives the reference policy."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def _add(self, linear: Any, module: str, layer: int, adapted: Mapping[str, Adapter], device: torch.device) -> None:
        """Add adapters to a module of a layer, for those of its fused matrices that have one."""
        names = published_names(f"{module}.weight", layer, self.spec.tied_head)
        by_columns, parts = f"{module}.weight" in BY_COLUMNS, dict[int, LowRank]()
        for number, name in enumerate(names):
            if name in adapted:
                parts[number] = LowRank(adapted[name], by_columns, self.dropout, self.tensor, device)
                linear.add_module(name.split(".")[-2], parts[number])
        if parts:
            heads = self.spec.kv_heads // self.tensor if len(names) == 3 else 1
            linear.forward = partial(self._forward, linear.forward, by_columns, heads, len(names), parts)

    def _forward(
        self, plain: Linear, by_columns: bool, heads: int, made_of: int, parts: Mapping[int, LowRank], x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Forward pass of a layer with its adapters.

        Args:
            plain: forward pass without adapters.
            by_columns: as in `LowRank`.
            heads: groups into which the layer's outputs are split: key-value heads of a fused QKV, else 1.
            made_of: number of fused matrices.
            parts: adapters by number of the fused matrix.
        """
        from megatron.core.tensor_parallel import (
            gather_from_sequence_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        y, bias = plain(x)
        if not self._on:
            return y, bias
        exchange = reduce_scatter_to_sequence_parallel_region if by_columns else gather_from_sequence_parallel_region
        wide = x.float()
        low = exchange(
            torch.cat([F.linear(part.dropout(wide), part.lora_A) for part in parts.values()], -1), group=self.group
        )
        size = y.shape[-1] // heads
        widths = [size // made_of] * made_of
        if made_of == 3:
            widths = [width // self.spec.kv_heads for width in self.spec.qkv_widths]
        pieces = list(y.unflatten(-1, (heads, size)).split(widths, -1))
        for (number, part), own in zip(parts.items(), low.chunk(len(parts), -1), strict=True):
            added = F.linear(own, part.lora_B) * part.scale
            pieces[number] = (pieces[number] + added.unflatten(-1, (heads, -1))).to(y.dtype)
        return torch.cat(pieces, -1).flatten(-2), bias


# --------------------------------------------------------------------------------------------------------------------
# Megatron on a CPU, for tests and small runs. Nothing here is used on GPUs.
#
# Megatron allocates buffers on `cuda` or on `torch.cuda.current_device()`, calls `torch.cuda.synchronize()`, uses CUDA
# streams for mixtures of experts, and compares dtypes by type name (`torch.cuda.FloatTensor`). All of this fails
# without a GPU, so it is patched. The computation is the same.


class _NoGPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")
        return result


class _Stream:
    """A dummy CUDA stream and event: on a CPU every operation has finished."""

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


_ONLY = _Stream()
_all_to_all: Any = dist.all_to_all_single


def _all_to_all_single(*arguments: Any, **named: Any) -> Any:
    """Convert split sizes to lists, which Megatron does only on a GPU."""
    return _all_to_all(*arguments, **{key: v.tolist() if isinstance(v, Tensor) else v for key, v in named.items()})


@contextmanager
def _without_gpu() -> Iterator[None]:
    named: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda device=None: None,
        "Stream": lambda: _ONLY,
        "current_stream": lambda: _ONLY,
        "stream": lambda stream: nullcontext(),
    }
    exchange = mock.patch.object(dist, "all_to_all_single", _all_to_all_single)
    with mock.patch.multiple(torch.cuda, **named), exchange, _NoGPU():
        yield


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Context for calls of Megatron: on a CPU it patches the use of GPUs, on a GPU it does nothing.

    Example:
        >>> with on_device(torch.device("cpu")):
        ...     torch.zeros(1, device="cuda").type()
        'torch.cuda.FloatTensor'
    """
    return _without_gpu() if device.type == "cpu" else nullcontext()
