"""Configs and scripts in the formats of verl, TRL and OpenRLHF, and what they mean there."""

from pathlib import Path
from typing import Any

import pytest

from atomrl.config import ConfigError
from atomrl.tools.importers import Imported, import_config
from tests.tools.importers.conftest import Read

FILES = Path(__file__).with_name("files")
MAIN = "python3 -m verl.trainer.main_ppo"
VERL = f"{MAIN} algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m data.train_batch_size=4 "
VERL += "actor_rollout_ref.actor.ppo_mini_batch_size=4"
VERL_YAML = "trainer: {}\nactor_rollout_ref: {model: {path: m}}\nalgorithm: {adv_estimator: grpo}\ndata:"
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
KWARGS = "data.apply_chat_template_kwargs"
GRPO_YAML = "num_generations: 8\nreward_funcs: a.b\nmodel_name_or_path: m"
GRPO = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs"
SFT = "trl sft --model_name_or_path m"
DPO = "trl dpo --model_name_or_path m --dataset_name a/b"
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --reward.model_name_or_path r "
OPENRLHF += "--algo.advantage.estimator reinforce --data.prompt_dataset"
OFF = {"enable_thinking": False}
REFERENCES = """actor_rollout_ref: {{model: {{path: m}}, actor: {{use_kl_loss: "${{x.kl}}", kl_loss_coef: "${{x.c}}"}}}}
algorithm: {{adv_estimator: grpo}}
x: {{kl: "${{switch}}", c: 0.25}}
trainer: {{project_name: p, experiment_name: "${{trainer.project_name}}-x", default_local_dir: "${{oc.env:HOME}}/o"}}
switch: {}
"""


def at(imported: Imported, key: str) -> Any:
    """Return the value of a dotted key of the config; the record of the algorithm is that of the file."""
    found: Any = imported.tree if key.partition(".")[0] in ("algorithm", "reward") else imported.config
    for part in key.split("."):
        found = (
            found[int(part)] if part.isdigit() else found.get(part) if isinstance(found, dict) else getattr(found, part)
        )
    return found


@pytest.mark.parametrize(("text", "values", "said"), [
    # TRL
    *((f"{DPO} --beta 0.2 --loss_type {kind}", {
        "algorithm.loss.0.type": kind.removesuffix("_norm"), "algorithm.loss.0.beta": 0.2,
        "algorithm.score.length_normalised": True if kind in ("ipo", "sigmoid_norm") else None}, [])
      for kind in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
                   "apo_down", "discopop", "sigmoid_norm")),
    (f"{DPO} --loss_type robust --label_smoothing 0.1", {"algorithm.loss.0.label_smoothing": 0.1}, []),
    (f"{DPO} --label_smoothing 0.1", {"algorithm.loss.0.label_smoothing": None}, ["which is cDPO"]),
    (f"{DPO} --f_divergence_type alpha_divergence", {
        "algorithm.score": {"type": "log_ratio", "divergence": "alpha_divergence", "alpha": 0.5}}, []),
    ("trl cpo --model_name_or_path m --dataset_name a/b --loss_type simpo --cpo_alpha 0", {
        "algorithm.nll": {"coefficient": 0.0}, "algorithm.loss.0.target_margin": 0.5}, []),
    (f"{SFT} --packing --dataset_text_field text", {"sft.packing": "bfd"}, ["sft.train_on"]),
    (f"{SFT} --dataset_name a/b --dataset_config c --dataset_test_split dev --eval_strategy steps",
     {"data.train": "a/b:c:train", "data.eval": "a/b:c:dev"}, []),
    ("model_name_or_path: m\ndatasets:\n- {path: a/b, split: train}\n- {path: c/d, name: e}\npacking: false",
     {"data.train": ["a/b::train", "c/d:e:train"]}, []),
    (f"{GRPO} a.b --steps_per_generation 4 --eval_strategy steps --logging_steps 20", {"eval.every_steps": 5},
     ["those of 4 optimizer steps"]),
    (f"{GRPO} accuracy_reward pkg.f --reward_model_name_or_path org/rm --reward_weights 0.5 2.0 1.0", {
        "reward.functions.0.function": "reward_model", "reward.functions.0.weight": 0.5,  # before the functions
        "reward.functions.1": {"function": "boxed", "weight": 2.0}, "reward.functions.2.function": "pkg.f"}, []),
    (f"{GRPO} pkg.f --reward_weights 0.5", {
        "reward.functions": [{"function": "pkg.f", "completions": "messages", "weight": 0.5}]}, []),
    (f"{GRPO} a.b --chat_template_kwargs '{{\"enable_thinking\": false}}'", {"data.chat_template_kwargs": OFF}, []),
    (f"{GRPO} a.b", {"data.chat_template_kwargs": {}}, []),
    (f"{GRPO_YAML}\nchat_template_kwargs: {{a: 1, b: x}}", {"data.chat_template_kwargs": {"a": 1, "b": "x"}}, []),
    *((f"{GRPO_YAML}\n{more}", {"rollout.engine": "auto"}, []) for more in ("", "use_vllm: true")),
    *((f"{GRPO_YAML}\nlr_scheduler_type: {schedule}\nwarmup_ratio: 0.1", {"train.warmup_ratio": warmup}, [])
      for schedule, warmup in (("constant", 0.0), ("constant_with_warmup", 0.1))),
    (GRPO_YAML, {"data.max_prompt_tokens": 512}, ["longest prompt: TRL no limit; here 512"]),
    (f"{GRPO_YAML}\nmax_prompt_length: 9", {"data.max_prompt_tokens": 9, "data.overlong_prompt": "truncate"}, []),
    (f"{GRPO_YAML}\nuse_peft: true\nlora_target_modules: q_proj", {"model.lora.target_modules": ["q_proj"]}, []),
    (f"{GRPO_YAML}\neval_strategy: epoch\nsave_strategy: epoch\nreport_to: [comet_ml, wandb]",
     {"tracking.sinks": ["wandb"]},
     ["report_to: comet_ml has no counterpart", "eval_strategy=epoch (here it is by steps: eval.every_steps)",
      "save_strategy=epoch (here it is by steps: checkpoint.every_steps)"]),
    (f"trl vllm-serve --model m --a 1 --b 2 --c 3 --d 4 --e 5 --f 6 &\n{GRPO} a.b --no_bf16 "
     "--no-gradient_checkpointing",
     {"model.path": "m", "model.dtype": "float32", "model.gradient_checkpointing": False}, []),
    (f"{GRPO} a.b --num_generations 8\ntrl grpo --model_name_or_path b", {"model.path": "m"},
     ["a.sh has 2 such commands; the one with the most keys was used"]),
    # verl
    (f"{VERL}\n{MAIN} algorithm.adv_estimator=grpo", {"model.path": "m"},
     ["a.sh has 2 such commands; the one with the most keys was used"]),
    (f"{VERL} trainer.project_name=a && {VERL} {ACTOR}use_kl_loss=true", {"tracking.wandb_project": "a"}, []),
    (f"{VERL} trainer.logger=null", {"tracking.sinks": []}, []),
    (f"{VERL} {ACTOR}tis_imp_ratio_cap=2", {"algorithm.rollout_is": [{"type": "token_tis", "high": 2.0}]}, []),
    *((f"{VERL} {key}", {"rollout.engine": engine}, []) for key, engine in (
        ("", "auto"), (f"{ROLLOUT}name=vllm", "auto"), (f"{ROLLOUT}name=sglang", "sglang"),
        (f"{ROLLOUT}name=hf", "hf"))),
    *((f"{VERL} {key}", {"data.chat_template_kwargs": values}, []) for key, values in (
        (f"+{KWARGS}.enable_thinking=False", OFF), (f"'+{KWARGS}={{enable_thinking:False}}'", OFF),
        (f"'{KWARGS}={{reasoning_effort: low}}'", {"reasoning_effort": "low"}))),
    (f"{VERL_YAML}\n  apply_chat_template_kwargs: {{enable_thinking: false}}", {"data.chat_template_kwargs": OFF}, []),
    *((REFERENCES.format(switch), {"algorithm.kl.coefficient": coefficient, "run_name": "p-x"},
       ["output_dir: '${oc.env:HOME}/o' is known only to OmegaConf: write its value"])
      for switch, coefficient in (("false", 0.0), ("true", 0.25))),
    (f"{VERL} algorithm.kl_ctrl.kl_coef=0.01 {ACTOR}ppo_micro_batch_size=8",  # verl 0.1
     {"algorithm.kl.coefficient": 0.01, "algorithm.clip.dual": None}, []),
    (f"{VERL} algorithm.kl_ctrl.kl_coef=0.01 {ACTOR}ppo_micro_batch_size_per_gpu=8",
     {"algorithm.kl.coefficient": 0.0, "algorithm.clip.dual": 3.0}, ["kl_coef=0.01 is not applied"]),
    # OpenRLHF
    (f'srun -N 2 bash -c "pip install x && ray job submit -- {OPENRLHF} d.jsonl"', {"model.path": "m"}, []),
    (f"{OPENRLHF} d.jsonl", {"rollout.engine": "auto"}, []),
    *((f"{OPENRLHF} d.jsonl --lr_scheduler {schedule} --lr_warmup_ratio 0.1",
       {"train.warmup_ratio": warmup, "train.schedule": "constant"}, [])
      for schedule, warmup in (("constant", 0.0), ("constant_with_warmup", 0.1))),
    *((f"{OPENRLHF} {given}", {"data.train": train}, []) for given, train in (
        ("a.jsonl,b.jsonl", ["a.jsonl", "b.jsonl"]), ("Org/prompts-v0.1", "Org/prompts-v0.1::train"),
        ("Org/sums --prompt_split test[:9]", "Org/sums::test[:9]"), ("./rows", "./rows"))),
    # LLaMA-Factory
    ("model_name_or_path: m\ndo_train: true\ndataset: d\nstage: sft\nfinetuning_type: lora\nlora_rank: 4\n"
     "lora_target: all\nneat_packing: true", {
        "model.lora.rank": 4, "model.lora.alpha": 8.0, "model.lora.dropout": 0.0,
        "model.lora.target_modules": "all-linear", "sft.packing": "bfd"}, []),
])  # fmt: skip
def test_what_a_key_becomes(text: str, values: dict[str, object], said: list[str], read: Read) -> None:
    imported = read(text)
    assert {key: at(imported, key) for key in values} == values
    assert not [words for words in said if words not in imported.report()]
    assert not any("kwargs" in line for line in imported.without_counterpart)
    assert not any("download" in line for line in imported.approximated)


def test_processes_multiply_trls_batches(read: Read, tmp_path: Path) -> None:
    config = import_config(FILES / "trl_cispo.sh", processes=8).config
    assert (config.rollout.prompts_per_step, config.train.rows_per_update) == (128 // 8, 2 * 8 * 8)
    with pytest.raises(ConfigError, match="option for TRL"):
        import_config(FILES / "verl_dapo.sh", processes=8)
    (tmp_path / "zero3.yaml").write_text("num_processes: 4\ndistributed_type: DEEPSPEED\n")
    for launcher, count in (
        ("torchrun --nnodes 2 --nproc-per-node 4", 8), ("accelerate launch --num_processes 8", 8),
        ("accelerate launch --config_file zero3.yaml", 4), ("torchrun --nproc_per_node gpu", 1),
    ):  # fmt: skip
        imported = read(GRPO.replace("trl grpo", f"{launcher} -m trl.scripts.grpo") + " a.b")
        assert imported.config.train.rows_per_update == count * 8
    assert imported.report().startswith("1 GPU: the script does not set the number")


def test_the_trainer_is_recognised_or_asked_for(read: Read) -> None:
    flags, two = "--model_name_or_path m --learning_rate 1e-5", f"{SFT}\ntrl dpo --model_name_or_path n"
    beta = "model_name_or_path: m\nbeta: 0.1"
    for words in ("trl dpo", "python -m trl.scripts.dpo", "accelerate launch --num_processes 2 trl/scripts/dpo.py"):
        assert read(f"{words} {flags}").config.kind == "preference"
    assert read("model_name_or_path: m\npacking: true").config.kind == "sft"
    assert read(beta, "dpo/config.yaml").config.kind == "preference"
    for text in (beta, two):
        assert read(text, library="trl", trainer="dpo").config.kind == "preference"
        with pytest.raises(ConfigError, match="--trainer"):
            read(text, library="trl")
    with pytest.raises(ConfigError, match="--trainer"):
        import_config(FILES / "verl_dapo.sh", "verl", trainer="dpo")


def test_a_key_of_wandb_is_a_secret() -> None:
    imported = import_config(FILES / "openrlhf_reinforce_pp.sh")
    assert imported.config.tracking.sinks == ["wandb"]
    assert "SECRET" not in imported.report() + imported.yaml()


RS = "algorithm.rollout_correction.rollout_rs"
FILTER, TIS = "--algo.dynamic_filtering_enable", "--enable_vllm_is_correction"


@pytest.mark.parametrize(("library", "text", "message"), [
    ("verl", f"{MAIN} algorithm.adv_estimator=optimal_token", "adv_estimator"),
    ("verl", f"{MAIN} {ACTOR}policy_loss.loss_mode=new algorithm.adv_estimator=grpo", "gspo"),
    ("verl", "echo 'nothing here'", "no command with key=value"),
    ("verl", "data: {train: a.jsonl}\nalgorithm: {name: grpo}", "not a config of verl"),
    ("verl", 'run a.b="never closed', "unclosed quote"),
    ("verl", 'N="it\'s"\nrun a.b=$N', r"a\.sh.*\$N.*No closing"),
    ("verl", f"{VERL} algorithm.use_kl_in_reward=true {ACTOR}use_kl_loss=true", "one of the two"),
    ("verl", f"{VERL} {ROLLOUT}n=$N", "rollout.n"),
    ("verl", f"{VERL} algorithm.rollout_is=True", "rollout_correction.rollout_is"),
    ("verl", f"{VERL} {ACTOR}use_kl_loss=$KL", r"use_kl_loss=\$KL is neither true nor false"),
    ("verl", "actor_rollout_ref: {actor: {use_kl_loss: '${oc.env:KL}'}}\nalgorithm: {adv_estimator: grpo}",
     "use_kl_loss=.*neither true nor false"),
    ("verl", f"{VERL} algorithm.kl_ctrl.type=$T algorithm.use_kl_in_reward=true", "kl_ctrl.type"),
    ("verl", f"{VERL} {ACTOR}optim.betas=[0.9]", "betas"),
    ("verl", f"{VERL} reward_model.overlong_buffer.enable=True", "overlong_buffer.len=None is not a number"),
    ("verl", f"{VERL} {ACTOR}loss_agg_mode=[token-mean]", "loss_agg_mode"),
    ("verl", f"{VERL} {ACTOR}loss_agg_mode=seq-mean-token-sum-norm {ACTOR}loss_scale_factor=abc",
     "loss_scale_factor=abc is not a number"),
    ("verl", f"{VERL} {RS}=seq_mean_k3,token_k3 {RS}_threshold=0.1,0.2,0.3",
     "names 2, and rollout_rs_threshold=0.1,0.2,0.3 has 3 thresholds"),
    ("verl", f"{VERL} {RS}=seq_mean_k3", "rollout_rs needs a number above 0 .* not None"),
    ("verl", f"{VERL} {RS}=seq_mean_k1 {RS}_threshold=0.5_much", "rollout_rs needs a number above 0 .* not much"),
    ("verl", f"{VERL} {RS}=seq_mean_k1 {RS}_threshold=0", "rollout_rs needs a number above 0 .* not 0"),
    ("verl", f"{VERL} actor_rollout_ref.model.custom_chat_template=x", "chat_template"),
    *(("verl", f"{VERL} {key}", f"did you mean '{meant}'") for key, meant in (
        (f"{ACTOR}optim.lrr=1e-6", f"{ACTOR}optim.lr"), (f"{ACTOR}optm.lr=1e-6", f"{ACTOR}optim.lr"),
        ("trainr.total_epochs=1", "trainer.total_epochs"))),
    ("verl", f"{VERL} \\\n  {ACTOR}optim.lr=abc", r"a\.sh:2: verl's actor_rollout_ref.actor.optim.lr=abc"),
    ("verl", "actor_rollout_ref:\n  rollout:\n    n: many\n", r"a\.yaml:3: verl's .*=many"),
    *(("trl", f"trl {flags}", message) for flags, message in (
        ("grpo --loss_type luspo", "loss_type=luspo"), ("grpo --loss_type cispo", "epsilon_high"),
        ("grpo --num_generations 16", "not a multiple of num_generations=16"),
        ("grpo --use_adaptive_entropy", "use_adaptive_entropy=True"),
        ("grpo --epsilon wide", "epsilon=wide is not a number"),
        ("grpo --num_generations 2.5", "num_generations=2.5 is not a whole number"),
        ("grpo --model_name_or_path m --beta 0.1", "names no reward"),
        ("sft --loss_type dft", "loss_type=dft"), ("dpo --loss_type ipo sigmoid", "a run has one score"),
        ("dpo --loss_type sft", "SFT"), ("dpo --loss_type new", "loss_type=new"),
        ("dpo --loss_type sigmoid hinge --loss_weights 1.0", "not 2 numbers"),
        ("dpo --use_weighting", "use_weighting=True"),
        ("dpo --loss_type apo_zero --f_divergence_type forward_kl", "apo_zero"),
        ("dpo --truncation_mode keep_end", "keep_end"),
        ("sft --config none.yaml", "--config none.yaml is not there"),
        ("sft --model_name_or_path m --chat_template_path qwen.jinja", "chat_template"))),
    ("trl", f"{GRPO} a.b --chat_template_kwargs $KWARGS", "chat_template"),
    ("trl", f"{GRPO} a.b c.d --reward_model_name_or_path org/rm --reward_weights 0.5 2.0",
     "has 2 weights for 3 rewards"),
    ("trl", f"{DPO} --bta 0.1", "did you mean 'beta'"), ("trl", f"{DPO} --zzzzqq 0.1", "valid names is similar"),
    *(("trl", f"{GRPO_YAML}\n{key}: {value}", key) for key, value in (
        ("num_iterations", 0), ("per_device_train_batch_size", 0), ("loss_type", "[grpo]"), ("warmup_steps", "abc"),
        ("temperature", "true"), ("use_vllm", "'$VLLM'"))),
    ("trl", "num_generations: 0", "num_generations=0 is not at least 1"),
    ("trl", "num_generations: 8\nreward_funcs: 3", "a.yaml cannot be read"),
    ("trl", f"{GRPO_YAML}\nreport_to: 5", "a.yaml cannot be read"),
    ("trl", f"{GRPO_YAML}\ntemperature: hot", r"a\.yaml:4: TRL's temperature=hot"),
    ("trl", f"{GRPO_YAML}\nlearning_rate: -1", r"train.learning_rate.*from .*a\.yaml:4: TRL's"),
    ("openrlhf", "beta: 1", "give the script"),
    *(("openrlhf", f"{OPENRLHF} d.jsonl {flags}", message) for flags, message in (
        (f"--vllm_is_truncated_threshold 2 {TIS}", "not 2 numbers"),
        (f"--policy_loss_type gspo {TIS}", "enable_vllm_is_correction"),
        (f"{FILTER} --algo.dynamic_filtering_range 0.1 0.9", "0.1, 0.9"),
        ("--init_kl_coef abc", "init_kl_coef=abc is not a number"),
        ("--temperature", "temperature=True is not a number"),
        ("--use_kl_loss $KL", "neither true nor false"), ("--data.tokenizer_chat_template x", "chat_template"),
        ("--tokenizer_chat_template x", "chat_template"),
        ("--rollout.batch_sise 4", "did you mean --rollout.batch_size"),
        ("\\\n --rollout.temperature hot", r"a\.sh:2: OpenRLHF's .*=hot"))),
])  # fmt: skip
def test_what_it_refuses(library: str, text: str, message: str, read: Read) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text, library=library)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04\xff")
    with pytest.raises(ConfigError, match="is a pickle"):
        import_config(tmp_path / "training_args.bin", "openrlhf")


def test_nothing_is_executed(tmp_path: Path, read: Read) -> None:
    marker = tmp_path / "executed"
    script = f"N=$(touch {marker}; echo 4)\nM=`touch {marker}`\n"
    imported = read(f"{script}{VERL} trainer.project_name=$N a.b=$(touch {marker})", "a.sh")
    assert not marker.exists()
    assert "$(touch" in imported.config.tracking.wandb_project
