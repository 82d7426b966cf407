"""Whether AtomRL trains each model type of transformers: tiny configs, one step, and the page docs/reference/models.md.

python -m tests.models.families     writes the page (`make models-page`)
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.auto import modeling_auto as auto

from atomrl.algorithms import objective_of
from atomrl.config import ConfigError, load_config
from atomrl.models.loading import load_policy, load_tokenizer, save_model
from atomrl.models.published import published_weights
from atomrl.models.shapes import auto_class
from atomrl.models.transformers_model import HFModel
from atomrl.trainer.checks.config import check_policy
from atomrl.trainer.memory import memory_by_phase
from tests.tiny import make_tiny_tokenizer

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
TYPES = sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
TOKENS = torch.arange(20).view(2, 10) + 5

# --------------------------------------------------------------------------------------------------------------------
# Tiny configs: the default config of each model type, with small sizes.

HIDDEN, HEADS, HEAD, VOCABULARY = 32, 4, 8, 102
NAMES = [
    (HIDDEN, "hidden_size n_embd d_model dim out_hidden_size embed_dim embedding_size embedding_dim embed_dims"),
    (HIDDEN, "attention_hidden_size output_dim projection_dim vision_output_dim projector_input_dim linear_size"),
    (HIDDEN, "projector_output_dim projector_hidden_size projection_size word_embed_proj_dim decoder_hidden_size"),
    (HIDDEN, "hidden_dim encoder_hidden_size output_hidden_size lru_width text_hidden_size emb_dim"),
    (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (HEADS, "attention_heads linear_num_value_heads num_encoder_attention_heads num_decoder_attention_heads"),
    (HEADS, "kv_n_heads num_kv_heads"),
    (HEADS, "index_n_heads num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "top_k_experts num_key_value_heads linear_num_key_heads num_global_key_value_heads"),
    (2, "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_encoder_layers"),
    (2, "num_decoder_layers num_blocks num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k"),
    (HEAD, "head_dim d_kv attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim"),
    (HEAD, "rotary_dim linear_value_head_dim global_head_dim swa_head_dim index_head_dim"),
    (HEAD, "hidden_size_per_layer_input d_head"),
    (64, "intermediate_size ffn_dim n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim inner_dim mlp_dim d_ff"),
    (64, "intermediate_size_mlp dense_intermediate_size block_ff_dim codebook_size num_embeddings"),
    (16, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size kv_lora_rank q_lora_rank"),
    (16, "moe_shared_expert_intermediate_size mamba_d_state state_size o_lora_rank num_position_embeddings"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size text_vocab_size shape_vocab_size"),
    (128, "max_position_embeddings n_positions max_seq_len seq_length n_ctx max_target_positions"),
    (100, "encoder_hash_byte_group_vocab"),
    (32, "base_channels"),
]  # fmt: skip
SIZES = {name: value for value, names in NAMES for name in names.split()}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
KINDS = ("layer_types", "layers_block_type", "attention_layers")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
LEFT_OUT = ("model_type", "transformers_version", "architectures", "per_layer_config", "id2label", "label2id")
LATENT = {"num_key_value_heads": HEADS}
VISUAL = {"vocabulary_map": {"<image>": 90}, "vq_config": {"channel_multiplier": [1, 1], "attn_resolutions": [999]}}


def rope(*sections: int, rotated: float = 1.0) -> dict:
    fields = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotated}
    return {"head_dim": HEAD, "rope_parameters": fields | {"mrope_section": list(sections)}}


OTHER = {
    **dict.fromkeys(["axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear"], LATENT),
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
    "deepseek_v2": LATENT | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    **{kind: {"text_config": LATENT} for kind in ("kimi_k25", "glm5_next")},
    **{kind: {"text_config": rope(1, 1, 0, rotated=0.5)} for kind in ("glm4v", "glm46v", "glm_ocr")},
    **{kind: {"text_config": rope(1, 1, 0, rotated=0.5)} for kind in ("glmga", "glm4v_moe")},
    **{kind: {"text_config": rope(2, 1, 1)} for kind in ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"]},
    "paddleocr_vl": {"text_config": rope(2, 1, 1)},
    "ernie4_5_vl_moe": {"text_config": rope(1, 1, 2)},
    "axk1": LATENT | {"head_dim": 16},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8},
    "chameleon": VISUAL,
    "emu3": VISUAL,
    "janus": {"vq_config": VISUAL["vq_config"]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
                     "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [64, 64]},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 64,
                                 "head_dim": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
                                 "num_key_value_heads": 2}},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16]},
    "granite4_vision": {"text_config": {"model_type": "granite"}},
}  # fmt: skip
"""Fields of model types whose sizes depend on each other otherwise."""


def small(fields: dict) -> dict:
    """Return the fields of a config with small sizes: one layer of each kind, at least two."""
    count = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), None)
    kinds = next((fields[name] for name in KINDS if isinstance(fields.get(name), list) and fields[name]), None)
    chosen = sorted({kinds.index(kind) for kind in kinds} if kinds else {0, 1})
    chosen = chosen if len(chosen) > 1 else [0, 1]
    result = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            value = small(value)
        elif isinstance(value, list) and value and len(value) == count:
            value = [value[place] for place in chosen]
        elif isinstance(value, list) and value and name in SIZES:
            value = [SIZES[name]] * len(value)
        elif name in LAYERS and kinds:
            value = len(chosen)
        elif value is None and name == "head_dim":
            value = HEAD
        elif isinstance(value, int) and not isinstance(value, bool):
            value = min(value, SIZES.get(name, value))
            value = SPECIAL.get(name, value)
            if str(name).endswith(("token_id", "token_index")) and name not in SPECIAL:
                value = min(value, 90 + sum(map(ord, name)) % 12)
        if name not in LEFT_OUT or isinstance(fields.get(name), str):
            result[name] = value
    return {name: value for name, value in result.items() if name not in LEFT_OUT[1:]}


def with_fields(fields: dict, other: dict) -> dict:
    """Return nested fields, of which some are others."""
    nested = {name for name, value in other.items() if isinstance(value, dict) and isinstance(fields.get(name), dict)}
    return fields | {name: with_fields(fields[name], other[name]) if name in nested else other[name] for name in other}


def tiny_config(kind: str):
    """Return a small config of a model type."""
    fields = with_fields(small(AutoConfig.for_model(kind).to_dict()), OTHER.get(kind, {}))
    return AutoConfig.for_model(kind, **{name: value for name, value in fields.items() if name != "model_type"})


# --------------------------------------------------------------------------------------------------------------------
# What happens to a model of each type.

NOT_TRIED = "not tried"
CLASSIFIERS = {"shieldgemma2"}
"""Types of image classifiers, for which transformers names the class of another type."""


def trial(kind: str, folder: Path) -> tuple[str, str]:
    """Plan, load, train for a step, save and load again a tiny model of a type.

    Returns:
        Its class, and what happened: `trains ...`, the reason why it is refused, or why it was not tried.

    Raises:
        AssertionError: it was saved as something else, or refused only after its weights were read.
    """
    if kind in CLASSIFIERS:
        return "", f"{NOT_TRIED}: it classifies images"
    try:
        shape = tiny_config(kind)
        torch.manual_seed(0)
        model = auto_class(shape).from_config(shape)
    except Exception as error:  # of any class of transformers
        return "", f"{NOT_TRIED}: {short(error)}"
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    source, saved, name = folder / "source", folder / "saved", type(model).__name__
    model.save_pretrained(source)
    make_tiny_tokenizer().save_pretrained(source)
    tree = {"run_name": "a", "model": {"path": str(source), "dtype": "float32"}, "data": {"train": "x.jsonl"}}
    config = load_config(tree)
    try:
        check_policy(config)
    except ConfigError as error:
        return name, "refused: " + short(error).removeprefix("model.path: ").replace(f"{source} is", "it is")
    try:
        model(input_ids=TOKENS)
    except Exception as error:  # its sizes do not fit each other
        return name, f"{NOT_TRIED}: {short(error)}"
    assert memory_by_phase(config, objective_of({"name": "grpo"}), 1, "cuda", 2).resident > 0
    policy = load_policy(source, dtype="float32")
    optimizer = torch.optim.SGD([weight for weight in policy.parameters() if weight.requires_grad], 1e-3)
    policy(TOKENS).square().mean().backward()
    unused = [weight for weight in policy.parameters() if weight.requires_grad and weight.grad is None]
    optimizer.step()
    save_model(policy, load_tokenizer(source), saved)
    before, after = load_file(source / "model.safetensors"), load_file(saved / "model.safetensors")
    again = auto_class(AutoConfig.from_pretrained(saved)).from_pretrained(saved).eval()
    assert type(again) is type(model)
    assert torch.allclose(again(input_ids=TOKENS).logits.float(), policy(TOKENS), atol=1e-4)
    one, other = (json.loads((place / "config.json").read_text()) for place in (source, saved))
    assert (one["architectures"], one["model_type"]) == (other["architectures"], other["model_type"])
    own = (before if before.keys() == after.keys() else published_weights(model)).keys()
    assert after.keys() == own, sorted(after.keys() ^ own)[:4]  # a few types keep transformers' own names
    tower = [name for name, weight in policy.named_parameters() if not weight.requires_grad]
    kept = sum(torch.equal(before[name], after[name]) for name in before.keys() & after.keys())
    assert kept >= len(tower) or before.keys() != after.keys()
    return name, "; ".join(notes(policy, tower, unused, before.keys() == after.keys()))


def notes(policy, tower: list[str], unused: list, same_names: bool) -> list[str]:
    said = ["trains"]
    if tower:
        said.append("tower kept")
    if not isinstance(policy, HFModel):
        said.append("built-in decoder")
    elif policy.streams:
        said.append("packed rows")
    if unused:
        said.append(f"{len(unused)} weight{'s' if len(unused) > 1 else ''} without use in text")
    return said if same_names else [*said, "saved under the names that transformers gives its weights in memory"]


def short(error: Exception) -> str:
    """Return an error in a line of a table."""
    text = re.sub(r"\s+", " ", str(error)).replace("|", "/").replace("`", "")
    return text if len(text) < 160 else text[:160].rsplit(" ", 1)[0] + " ..."


def row(kind: str) -> str:
    """Return the line of the page for a model type."""
    with TemporaryDirectory() as folder:
        name, said = trial(kind, Path(folder))
    return f"| {kind} | {name} | {said} |"


HEADER = f"""# Models

Find out whether AtomRL trains a model, and what happens to it. A test makes a tiny model of every causal and
image-text model type of transformers, plans it, trains it for a step, saves it and loads it again. This table is what
it found with transformers {transformers.__version__}; `make models-page` writes it anew.

- **trains**: the saved folder has the same class, `architectures` and names of weights as the source.
- **tower kept**: the checkpoint has a vision tower. Training on text leaves it frozen, and it is saved bit-equal
  (not compared where names differ). [Some families](../guides/vision.md) are trained on pictures too.
- **packed rows**: rows are computed end to end, with shared prompts once. Others are padded.
- **built-in decoder**: trained by `atomrl.models.gpt`, which is faster.
- **refused**: with this reason, in the dry run and before weights are read. Of encoder-decoders only classes without
  the encoder train (`BartForCausalLM`). State space models train without a mask, because rows are padded on the right.
- **not tried**: no tiny model of its default config could be made or run here, which says nothing about the type.

A type that is not in the table can be tried: `atomrl train CONFIG --dry-run` says whether it is refused.

| model type | class | result |
|---|---|---|
"""


def main(kinds: list[str]) -> None:
    """Write the page, or only the lines of some types."""
    transformers.logging.set_verbosity_error()
    kept = (
        {} if not kinds else {line.split("|")[1].strip(): line for line in PAGE.read_text().splitlines() if "|" in line}
    )
    lines = []
    for kind in TYPES:
        if kinds and kind not in kinds:
            lines.append(kept[kind])
            continue
        try:
            lines.append(row(kind))
        except Exception as error:
            lines.append(f"| {kind} | | FAILED: {type(error).__name__}: {short(error)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    PAGE.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
