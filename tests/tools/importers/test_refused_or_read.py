"""Files of the shapes that public repositories have: each is imported as what it trains, or refused."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from atomrl import sandbox
from atomrl.common.functions import find_function
from atomrl.config import ConfigError
from atomrl.tools.importers import import_config, llamafactory, names, skyrl
from tests.tools.importers.conftest import Read

PPO = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m"
MODEL = "actor_rollout_ref.model."
CORRECTION = "algorithm.rollout_correction."
DISTILLED = "distillation.enabled=true distillation.distillation_loss.use_task_rewards=false "
DISTILLED += "distillation.distillation_loss.use_policy_gradient=true +distillation.teacher_models.a.model_path=t "
DISTILLED += "distillation.distillation_loss."
SFT = "torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=org/m optim.lr=2e-5"
SEARCH = (
    f"{PPO} max_turns=2 retriever.url=http://x:1/retrieve retriever.topk=5 actor_rollout_ref.actor.state_masking=true "
    "actor_rollout_ref.rollout.n_agent=5 data.max_obs_length=400 data.max_start_length=2048 "
    "data.max_prompt_length=4096 "
    "data.max_response_length=300 actor_rollout_ref.actor.ppo_micro_batch_size=64"
)
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --algo.advantage.estimator reinforce "
OPENRLHF += "--data.prompt_dataset d.jsonl"
OPENRLHF_SFT = "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset d.jsonl"
TRL = "model_name_or_path: m\n"
GRPO = f"{TRL}num_generations: 8\n"
LLAMA = "model_name_or_path: m\ndo_train: true\ndataset: mine\n"
SKYRL = "uv run -m skyrl.train.entrypoints.main_base trainer.policy.model.path=m"


@pytest.mark.parametrize(("text", "message"), [
    (PPO.replace("trainer.main_ppo", "trainer.main_generation"), "main_generation, which trains nothing: supported"),
    (PPO.replace("-m verl.trainer.main_ppo", "-m my.main_verl."), "starts my.main_verl.: supported"),
    (PPO.replace("trainer.main_ppo", "experimental.one_step.main_ppo"), "one_step.main_ppo: supported"),
    (PPO.replace("python3 -m verl.trainer.main_ppo", "run"), "starts no program of verl"),
    (f"{PPO} --config-path=config --config-name=other", "--config-name=other is not there"),
    (f"{PPO} {DISTILLED}use_task_rewards=true", "use_task_rewards=True"),
    (f"{PPO} {DISTILLED}use_policy_gradient=false", "use_policy_gradient=False .* a distance of its own"),
    (f"{PPO} {DISTILLED}loss_mode=forward_kl_topk", "loss_mode=forward_kl_topk .* supported: k1, kl"),
    (f"{PPO} {DISTILLED}loss_mode=k1 +distillation.teacher_models.b.model_path=b", "teacher_models=2 models"),
    (f"{PPO} {DISTILLED}loss_mode=k1 {CORRECTION}bypass_mode=true", "bypass_mode=True"),
    (f"{PPO} {CORRECTION}bypass_mode=true {CORRECTION}loss_type=x", "loss_type=x .* supported: ppo_clip, reinforce"),
    (f"{PPO} {CORRECTION}rollout_rs=seq_max_k1 {CORRECTION}rollout_rs_threshold=2", "rollout_rs=seq_max_k1"),
    (f"{PPO} data.custom_cls.path=rows.py", "custom_cls.path=rows.py"),
    (f"{PPO} {MODEL}exclude_modules=.*mlp.*", "exclude_modules=.*mlp.* model.lora.target_modules"),
    (f"{PPO} {MODEL}path=", "model.path is empty: give the script the model's path"),
    (f"{SFT} data.truncation=left", "truncated at the end"),
    (SEARCH.replace("state_masking=true", "state_masking=false"), "state_masking=False"),
    (f"{SEARCH} do_search=false", "do_search=False"),
    (f"{OPENRLHF} --reward.remote_url r.py --train.partial_rollout_enable", "needs train.async_enable"),
    (f"{OPENRLHF} --reward.remote_url r.py --train.async_enable --rollout.vllm_generate_batch_size 9",
     "vllm_generate_batch_size=9 has no counterpart"),
    (OPENRLHF, "has no reward"),
    ("source ./train_dpo.sh slurm\nsrun openrlhf $commands", "it reads ./train_dpo.sh: import that one"),
    ("python train.py --max_completion_length 9", "train.py, a Python file .* atomrl run train.py FLAGS"),
    ("accelerate launch trl/examples/scripts/rloo_vlm.py --beta 0", "rloo_vlm.py, a Python file"),
    ("accelerate launch bco.py --trl x", "bco.py, a Python file"),
    (f"{GRPO}reward_funcs: [cf_code]", "reward_funcs=cf_code .* supported names"),
    (f"{TRL}packing: true\nspectrum: 1", "has no argument 'spectrum'"),
    (f"{LLAMA}stage: ppo\nfinetuning_type: full", "stage=ppo has no counterpart; supported: pt, sft, dpo, kto, rm"),
    (f"{LLAMA}stage: sft\nfinetuning_type: full\nlearning_rat: 1", r"a\.yaml:6: .* has no key .* mean 'learning_rate'"),
    (f"{LLAMA}stage: dpo\nfinetuning_type: full\nbeta: 0.2", "a.yaml:6: LLaMA-Factory has no key 'beta'"),  # TRL's name
    (f"{LLAMA}stage: kto\nfinetuning_type: full\npref_ftx: 0.2", "pref_ftx=0.2 .*: kto has no pairs"),
    (f"{LLAMA}stage: dpo\nfinetuning_type: full\nld_alpha: 0.5", "ld_alpha=0.5"),
    (f"{LLAMA}stage: sft\nfinetuning_type: freeze", "finetuning_type=freeze"),
    (f"{LLAMA}stage: sft\nfinetuning_type: full\nadapter_name_or_path: a", "adapter_name_or_path=a .* merge"),
    (f"{LLAMA}stage: sft\nfinetuning_type: lora\nadapter_name_or_path: a,b", "one folder of adapters"),
    (f"{LLAMA}stage: sft\nfinetuning_type: full\nfreeze_multi_modal_projector: false", "a part of the tower"),
    (f"{LLAMA}stage: sft\nfinetuning_type: lora\nquantization_bit: 3", "quantization_bit=3 .* supported: 4, 8"),
    (f"{LLAMA}stage: sft\nfinetuning_type: full\ntokenized_path: rows", "tokenized_path=rows .* remove the key"),
    (f"{LLAMA}stage: dpo\nfinetuning_type: full\npref_loss: kto_pair", "pref_loss=kto_pair"),
    (f"{SKYRL} generator.max_turns=3", "max_turns=3"),
    ("bash run_gsm8k.sh trainer.policy.lr=1", "starts run_gsm8k.sh of SkyRL"),
    (f"{SKYRL} environment.env_class=search", "env_class=search"),
    (f"{SKYRL} \\\n trainer.policy.optimizer_config.lrr=1", r"a\.sh:2: SkyRL has no key .* mean '.*_config\.lr'"),
    (f"{SKYRL} generator.gpu_memory_utilization=0.5", "mean 'generator.inference_engine.gpu_memory_utilization'"),
    (f"{SKYRL} trainer.algorithm.overlong_buffer_len=9", "has no key 'trainer.algorithm.overlong_buffer_len'"),
    (f"{SKYRL} trainer.algorithm.policy_loss_type=dppo", "policy_loss_type=dppo .* supported: regular"),
    (f"{SKYRL} trainer.algorithm.policy_loss_type=rollout_is", "rollout_is .* a step has one update here"),
    (f"{SKYRL} trainer.algorithm.dynamic_sampling.type=replace", "dynamic_sampling.type=replace"),
    (f"{SKYRL} trainer.algorithm.off_policy_correction.sequence_mask_metric=product", "sequence_mask_metric=product"),
    (f"{SKYRL} trainer.algorithm.use_tis=true trainer.algorithm.policy_loss_type=kl_cov", "policy_loss_type=kl_cov"),
    (f"{SKYRL} trainer.fully_async.enabled=true", "fully_async.enabled=True .* no other program"),
    (f"{SKYRL} generator.vision_language_generator=true generator.max_turns=3", "max_turns=3"),
    (f"{SKYRL} generator.vision_language_generator=true trainer.policy.language_model_only=true",
     "language_model_only=True has no counterpart and affects training: the data have pictures"),
    (f"{SKYRL} generator.vision_language_generator=true generator.inference_engine.language_model_only=true",
     "inference_engine.language_model_only=True has no counterpart"),
    (f"{SKYRL} generator.vision_language_generator=maybe", "vision_language_generator=maybe is neither true nor"),
    (SKYRL.replace("skyrl.train.entrypoints.main_base", "examples.main_dapo"), "main_dapo of SkyRL: supported"),
    ("model: m\nmodel_class: llm\nmax_new_tokens: 9", "LLaMA-Factory v1, which is not supported"),
    ("base_model: m\nrl: dpo", "axolotl, which is not supported: supported are verl, TRL"),
    ("policy: {model_name: m}\ngrpo: {num_prompts_per_step: 2}", "NeMo-RL, which is not supported"),
    ("swift rlhf --rlhf_type grpo --model m", "ms-swift, which is not supported"),
    ("uv run rl @ rl.toml --a b", "prime-rl, which is not supported"),
    ("llamafactory-cli train a.yaml", "give the YAML file of llamafactory-cli train"),
])  # fmt: skip
def test_what_is_not_understood_is_refused(text: str, message: str, read: Read) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


@pytest.mark.parametrize("name", ["train.py", "notebook.ipynb"])
def test_python_is_run_and_not_imported(name: str, read: Read) -> None:
    with pytest.raises(ConfigError, match=rf"atomrl run .*{name} --config-out .*yaml"):
        read("print()", name)


@pytest.mark.parametrize(("name", "message"), [("bco/config.yaml", "bco by its name"), ("a.yaml", "set --trainer")])
def test_a_trainer_that_the_keys_do_not_name_is_not_guessed(name: str, message: str, read: Read) -> None:
    with pytest.raises(ConfigError, match=message):
        read(f"{TRL}beta: 0.1", name)


@pytest.mark.parametrize("name", ["kto/config.yaml", "orpo/config.yaml", "cpo/config.yaml"])
def test_a_folder_names_the_trainer_of_an_older_file(name: str, read: Read) -> None:
    imported = read(f"{TRL}torch_dtype: bfloat16", name)
    assert imported.config.algorithm.name == name.split("/")[0]
    assert any("torch_dtype is a key of an older TRL" in line for line in imported.differences)


# ---- adapters ----


OPENRLHF_RM = "deepspeed --module openrlhf.cli.train_rm --model.model_name_or_path m --data.dataset d.jsonl"


@pytest.mark.parametrize(("text", "lora", "difference"), [
    (f"{LLAMA}stage: rm\nfinetuning_type: lora\nlora_rank: 4", {"rank": 4, "alpha": 8}, None),
    (f"{OPENRLHF_RM} --ds.lora.rank 4", {"rank": 4, "alpha": 16}, "score head beside adapters: OpenRLHF frozen"),
    ("trl reward --model_name_or_path m --dataset_name d --use_peft --lora_r 4 --lora_task_type SEQ_CLS", {"rank": 4},
     None),
    ("trl reward --model_name_or_path m --dataset_name d --use_peft --lora_r 4", {"rank": 4}, "lora_task_type=SEQ_CLS"),
])  # fmt: skip
def test_reward_models_have_adapters(text: str, lora: dict[str, Any], difference: str | None, read: Read) -> None:
    imported = read(text)
    assert imported.config.kind == "reward-model"
    given = imported.tree["model"]["lora"]
    assert given | lora == given and "modules_to_save" not in given
    said = [line for line in imported.differences if "score head" in line]
    assert len(said) == (difference is not None) and all(str(difference) in line for line in said)


@pytest.mark.parametrize("text", [
    f"{TRL}lora_modules_to_save: [lm_head, embed_tokens]\nuse_peft: true\npacking: true",
    f"{LLAMA}stage: sft\nfinetuning_type: lora\nadditional_target: lm_head,embed_tokens",
])  # fmt: skip
def test_modules_are_trained_beside_adapters(text: str, read: Read) -> None:
    assert read(text).config.model.lora.modules_to_save == ["lm_head", "embed_tokens"]  # type: ignore[union-attr]


@pytest.mark.parametrize("text", [
    f"{PPO} actor_rollout_ref.model.lora_adapter_path=there actor_rollout_ref.model.lora_rank=8",
    f"{SFT} model.lora_adapter_path=there model.lora_rank=8 data.response_key=a data.prompt_key=p",
    f"{LLAMA}stage: dpo\nfinetuning_type: lora\nlora_rank: 8\nadapter_name_or_path: there",
])  # fmt: skip
def test_training_starts_from_adapters(text: str, read: Read) -> None:
    """Their settings are in their folder. The reference of these libraries is the base."""
    imported = read(text)
    lora = {key: value for key, value in imported.tree["model"]["lora"].items() if key != "dropout"}
    assert lora == {"start": "there"} and imported.config.model.lora.reference == "base"  # type: ignore[union-attr]
    assert any("lora_rank=8" in line and "have their own" in line for line in imported.without_counterpart)


# ---- verl ----


def test_sft_of_verl_is_sft(read: Read) -> None:
    keys = "data.prompt_key=extra_info data.prompt_dict_keys=['question'] data.response_key=answer model.lora_rank=8"
    imported = read(f"{SFT} {keys} data.micro_batch_size=4")
    tree, config = imported.tree, imported.config
    assert (config.kind, config.model.path, config.train.rows_per_update) == ("sft", "org/m", 256)
    assert (tree["data"]["prompt_field"], tree["sft"]["completion_field"]) == ("question", "answer")
    assert "extra_info.question in the rows: write it to a column" in imported.to_do[0]
    train = tree["train"]
    assert (train["schedule"], tree["model"]["lora"]["rank"], train["adam_beta2"]) == ("cosine", 8, 0.95)
    engine = read("torchrun -m verl.trainer.sft_trainer model.path=m data.messages_key=turns engine=fsdp")
    assert (engine.config.kind, engine.tree["train"]["learning_rate"]) == ("sft", 1e-3)
    assert any("messages_key=turns" in line for line in engine.to_do)


def test_the_config_of_config_name_is_read(read: Read, tmp_path: Path) -> None:
    config = "defaults: [ppo_trainer, _self_]\nhydra: {searchpath: [x]}\n"
    config += "actor_rollout_ref: {actor: {ppo_mini_batch_size: 4}, rollout: {n: 16%s}}\n"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(config % "")
    text = f'DIR="$(pwd)"\n{PPO} --config-path="$DIR/conf" --config-name=mine'
    for place in ("a.sh", "scripts/deep/a.sh"):
        assert read(text, place).config.rollout.completions_per_prompt == 16
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "theirs.yaml").write_text(config % "")
    assert read(f"{PPO} --config-name=theirs", "a.sh").config.rollout.completions_per_prompt == 16
    (tmp_path / "conf" / "mine.yaml").write_text(config % ", agent: {agent_loop_config_path: a.yaml}")
    with pytest.raises(ConfigError, match=r"agent_loop_config_path=a\.yaml"):
        read(text, "a.sh")


def test_search_r1_is_several_turns_of_search(read: Read) -> None:
    imported = read(SEARCH)
    environment, rollout, algorithm = imported.config.environment, imported.config.rollout, imported.tree["algorithm"]
    assert environment is not None and environment.function == "search_r1"
    assert environment.args == {"url": "http://x:1/retrieve", "topk": 5, "max_searches": 2}
    assert (environment.max_turns, environment.max_turn_tokens, environment.max_reply_tokens) == (3, 300, 400)
    assert (rollout.completions_per_prompt, rollout.max_completion_tokens, rollout.top_p) == (5, 4096, 0.95)
    assert (imported.config.data.max_prompt_tokens, imported.config.train.rows_per_update) == (2048, 256)
    assert algorithm["kl"] | {"type": "k1", "coefficient": 0.001, "apply_to": "reward"} == algorithm["kl"]
    assert imported.tree["reward"]["functions"] == ["search_r1_em"]
    scored = f"{SEARCH} reward_model.structure_format_score=0.2"
    assert "structure_format_score=0.2: search_r1_em gives no part" in read(scored).to_do[0]


def test_bypass_mode_is_the_rollout_policy_as_the_old_policy(read: Read) -> None:
    """k1 is log mu - log pi: a bound on mu / pi is the other way round on pi / mu."""
    bypass = f"{PPO} {CORRECTION}bypass_mode=true actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
    imported = read(
        f"{bypass} {CORRECTION}rollout_is=token {CORRECTION}rollout_rs=\\'token_k1,seq_mean_k1,seq_max_k2\\' "
        f"{CORRECTION}rollout_rs_threshold=\\'0.5_4,0.5_4,2.5\\'"
    )
    algorithm = imported.tree["algorithm"]
    assert (algorithm["old_policy"], algorithm["clip"]["type"], algorithm["ratio"]["type"]) == (
        "rollout",
        "ppo",
        "token",
    )
    assert algorithm["rollout_is"] == [
        {"type": "kl_rejection", "low": -math.log(2), "bound": math.log(4), "level": "token", "estimator": "k1"},
        {"type": "sequence_mask", "low": 0.25, "high": 2.0},
        {"type": "kl_rejection", "bound": 2.5, "level": "max", "estimator": "k2"},
    ]
    keys = f"{CORRECTION}loss_type=reinforce {CORRECTION}rollout_is=sequence"
    imported = read(f"{bypass} {keys} {CORRECTION}rollout_is_batch_normalize=true")
    algorithm = imported.tree["algorithm"]
    weights = {"type": "sequence_tis", "high": 2.0, "normalised": False}
    assert (algorithm["clip"], algorithm["rollout_is"]) == ({"type": "reinforce"}, [weights])
    assert any("rollout_is_batch_normalize" in line for line in imported.differences)


def test_the_optimal_token_baseline(read: Read) -> None:
    estimator = PPO.replace("adv_estimator=grpo", "adv_estimator=optimal_token_baseline")
    imported = read(f"{estimator} actor_rollout_ref.actor.calculate_sum_pi_squared=True")
    assert imported.tree["algorithm"]["advantage"] == {"type": "optimal_token_baseline"} and not imported.to_do
    assert any("without weights" in line for line in read(f"{estimator} {CORRECTION}rollout_is=token").differences)


def test_distillation_is_a_policy_gradient_by_the_teacher(read: Read) -> None:
    imported = read(f"{PPO} {DISTILLED}loss_mode=k1 distillation.distillation_loss.loss_max_clamp=10.0")
    algorithm = imported.tree["algorithm"]
    assert imported.tree["teacher"] == {"path": "t"}
    assert (algorithm["name"], algorithm["advantage"]) == ("on_policy_distillation", {"type": "reverse_kl"})
    assert algorithm["clip"] == {"type": "ppo", "low": 0.2, "high": 0.2, "dual": 3.0}
    assert any("distillation_loss.loss_max_clamp=10.0" in line for line in imported.differences)


def test_keys_of_verl_that_name_what_the_run_does_anyway(read: Read) -> None:
    """Warm-ups count verl's steps, of which each has 4 updates here."""
    keys = "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 data.image_patch_size=16 "
    keys += (
        f"actor_rollout_ref.actor.optim.lr_warmup_steps=10 {MODEL}exclude_modules=.*visual.* {MODEL}torch_dtype=bf16 "
    )
    keys += "+algorithm.filter_groups._target_=a.B reward_model.sandbox_fusion.url=http://x"
    imported = read(f"{PPO} {keys}")
    assert not imported.to_do
    assert imported.config.train.warmup_updates == 40
    assert imported.tree["reward"]["by_data_source"] | {"apps": "code"} == imported.tree["reward"]["by_data_source"]
    shown = read(f"{PPO} {MODEL}override_config.max_position_embeddings=9 algorithm.gdpo_reward_keys=['a','b']").to_do
    assert "in config.json of the model" in shown[0] and "gdpo_reward_keys=a, b: write a function" in shown[1]


@pytest.mark.parametrize("key", ["actor_rollout_ref.rollout.zzz_zzz", "algorithm.zzz_zzz", "data.zzz_zzz", "zzz_zzz"])
def test_a_key_that_is_not_known_is_left_to_the_user(key: str, read: Read) -> None:
    assert f"{key}=1: not a key of verl that AtomRL knows" in read(f"{PPO} {key}=1").to_do[0]


# ---- OpenRLHF ----

AGENT = "class AgentExecutor(agent.{}):\n    def {}(self): super().__init__(AgentInstance)\n"


def test_an_agent_of_openrlhf_is_an_environment(read: Read, tmp_path: Path) -> None:
    text = f"{OPENRLHF} --data.max_len 400 --rollout.max_new_tokens 30 --train.agent_func_path agents/a.py"
    missing = read(text)
    assert missing.to_do == ("train.agent_func_path=agents/a.py: the file is not there; atomrl train needs it",)
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "a.py").write_text(AGENT.format("MultiTurnAgentExecutor", "__init__"))
    imported = read(f"{text} --train.async_enable --train.async_queue_size 2", "scripts/a.sh")
    environment, ahead = imported.config.environment, imported.config.asynchronous
    assert environment is not None and ahead is not None and not imported.to_do
    assert (environment.function, environment.args) == ("openrlhf_agent", {"path": "agents/a.py"})
    assert (environment.max_turns, environment.max_reply_tokens, environment.max_turn_tokens) == (400, 400, None)
    assert imported.config.rollout.max_completion_tokens == 400
    assert (ahead.max_staleness, ahead.on_update) == (2, "wait")
    assert imported.tree["algorithm"]["rollout_is"] == "none"
    for base, method in (("AgentExecutorBase", "__init__"), ("MultiTurnAgentExecutor", "execute")):
        (tmp_path / "agents" / "a.py").write_text(AGENT.format(base, method))
        with pytest.raises(ConfigError, match=r"agent_func_path=agents/a\.py .* samples by itself"):
            read(text)


def test_a_script_that_another_one_reads_is_read(read: Read, tmp_path: Path) -> None:
    words = OPENRLHF_SFT.removeprefix("deepspeed --module ")
    (tmp_path / "dpo.sh").write_text(
        f"read -r -d '' commands <<EOF\n{words} --data.output_key out \\\n --adam.lr 3e-6\nEOF\n"
        'if [[ ${1} != "slurm" ]]; then\n  deepspeed --module $commands --adam.lr 1\nfi\n'
    )
    wrapper = 'readonly file="dpo.sh"\nsource ./${file} slurm\necho $commands --adam.eps 1\n'
    wrapper += 'srun bash -c "cd /openrlhf; torchrun --nproc_per_node 4 -m ${commands}"'
    imported = read(wrapper, "wrapper.sh")
    assert (imported.config.kind, imported.config.train.learning_rate, imported.gpus) == ("sft", 3e-6, 4)
    assert not imported.to_do


# ---- Shell ----


@pytest.mark.parametrize(("root", "folder"), [
    ('"$(dirname "$0")"', "scripts"), ("$(pwd)", "scripts"), ('$(cd "$(dirname "$0")/.." && pwd)', ""),
    ("$(realpath $(dirname ${BASH_SOURCE[0]}))", "scripts"), ('"${X:=$(dirname "$0")}"', "scripts"),
])  # fmt: skip
def test_what_needs_the_scripts_path_alone_is_resolved(root: str, folder: str, read: Read, tmp_path: Path) -> None:
    text = f"DIR={root}\n{OPENRLHF} --reward.remote_url ${{DIR}}/r.py"
    files = read(text, "scripts/a.sh").files
    assert f'"{tmp_path / folder / "r.py"}:reward_func"' in files["a_rewards.py"]


@pytest.mark.parametrize(("text", "left"), [
    (f"URL=$(my-tool --port 3 && echo x)\n{OPENRLHF} --reward.remote_url ${{URL}}/score",
     ["reward.functions.args.url: '$(my-tool --port 3 && echo x)/score'"]),
    (f"{OPENRLHF} --reward.remote_url $DIR/r.py",
     ["a_rewards.py: 'theirs = find_function(\"$DIR/r.py:reward_func\")'"]),
    (f"D=e_$(date +%Y)\n{PPO} trainer.default_local_dir=c/$D trainer.experiment_name=`date +%F`", [
        "run_name: '`date +%F`'", "output_dir: 'c/e_$(date +%Y)'"]),
    (f"{PPO} trainer.project_name=$RANDOM data.train_files=${{X:-$(pwd -P)/a}}", [
        "data.train: '$(pwd -P)/a'", "tracking.wandb_project: '$RANDOM'"]),
    ("trl sft --model_name_or_path $1 --dataset_name a/b --output_dir out/${NAME}_$$", [
        "run_name: '${NAME}_$$'", "model.path: '$1'"]),
    (f"{SKYRL} trainer.ckpt_path=ckpt_${{N/a/b}}", ["output_dir: 'ckpt_${N/a/b}'"]),
    ("actor_rollout_ref: {model: {path: m}}\nalgorithm: {adv_estimator: grpo}\n"
     "trainer: {experiment_name: '${now:%Y}'}", ["run_name: '${now:%Y}'"]),
    (f"{GRPO}reward_funcs: a.b\nsystem_prompt: '$5 or `x`?'", []),
])  # fmt: skip
def test_what_only_the_shell_knows_is_left_to_the_user(text: str, left: list[str], read: Read) -> None:
    unknown = [line for line in read(text).to_do if "is known only to" in line]
    assert [line.partition(" is known only to ")[0] for line in unknown] == left
    assert all(" (from " in line for line in unknown if not line.startswith("a_rewards.py"))


@pytest.mark.parametrize(("given", "name"), [
    ("e-$(date +%F)", "e"), ("e-`date +%F`-7b", "e-7b"), ("$RANDOM/e_$$", "e"), ("e$(date $(x))", None), ("$1", None),
])  # fmt: skip
def test_a_name_loses_what_only_the_shell_knows(given: str, name: str | None, read: Read) -> None:
    imported = read(f"{PPO} trainer.experiment_name='{given}' trainer.project_name='{given}'")
    assert imported.tree["run_name"] == imported.tree["tracking"]["wandb_project"] == (name or given)
    told = imported.to_do if name is None else imported.approximated
    assert sum("trainer.experiment_name=" in line or "trainer.project_name=" in line for line in told) == 2


# ---- TRL, and recipes for it ----


def test_a_recipe_with_keys_of_an_older_trl(read: Read, tmp_path: Path) -> None:
    text = f"{GRPO}torch_dtype: bfloat16\nbenchmarks: [a]\nreward_funcs: [accuracy, format, tag_count]"
    imported = read(f"{text}\nsystem_prompt: Think.\ndataset_prompt_column: problem\nreward_weights: [1, 1, 0.5]")
    data, functions = imported.tree["data"], imported.tree["reward"]["functions"]
    assert (data["system_prompt"], data["prompt_field"], data["answer_field"]) == ("Think.", "problem", "solution")
    assert [one.get("weight", 1.0) for one in functions] == [1.0, 1.0, 0.5]
    assert imported.report().splitlines()[0].endswith("what the file does not set is the default of TRL 1.16")
    assert any(line.startswith("default of beta") and "0.14 0.04; here 0.0" in line for line in imported.differences)
    assert data["chat_template"] == "messages_only"
    (tmp_path / "a_rewards.py").write_text(imported.files["a_rewards.py"])
    good = "<think>\nx\n</think>\n<answer>\ny\n</answer>"
    for name, expected in (("open_r1_format", [1.0, 0.0]), ("open_r1_tag_count", [1.0, 0.25])):
        reward = find_function(f"{tmp_path}/a_rewards.py:{name}")
        assert reward(prompts=["", ""], completions=[good, "<think>\nx"]) == expected


def test_code_of_open_r1_is_run_in_the_sandbox(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{GRPO}reward_funcs: [code, code_format]\ncode_provider: morph"
    imported = read(text)
    functions = imported.tree["reward"]["functions"]
    assert functions[0] == {"function": "./a_rewards.py:open_r1_code", "timeout_s": 60.0}
    assert any("runs programs at morph" in line for line in imported.differences)
    with pytest.raises(ConfigError, match="code_language=cpp"):
        read(f"{text}\ncode_language: cpp")
    monkeypatch.setattr("atomrl.sandbox.check", lambda name: None)
    monkeypatch.setattr("atomrl.sandbox.run", partial(sandbox.run, sandbox="none"))
    (tmp_path / "a_rewards.py").write_text(imported.files["a_rewards.py"])
    reward = find_function(f"{tmp_path}/a_rewards.py:open_r1_code")
    cases = [{"input": "2", "output": "4"}, {"input": "3", "output": "9"}, {"input": "x", "output": "0"}]
    texts = ["```python\n0/0\n```", "```python\nprint(int(input()) ** 2, '\\nmore')\n```", "no program"]
    told = [{"test_cases": cases}] * 3
    assert reward(prompts=[""] * 3, completions=texts, verification_info=told) == [0.0, 2 / 3, 0.0]
    layout = find_function(f"{tmp_path}/a_rewards.py:open_r1_code_format")
    good = f"<think>\nx\n</think>\n<answer>\n{texts[0]}\n</answer>"
    assert layout(prompts=["", ""], completions=[good, texts[0]]) == [1.0, 0.0]


def test_a_revision_of_a_model_and_the_mixer_of_an_older_recipe(read: Read) -> None:
    recipe = {"model_name_or_path": "a/b", "model_revision": "v2", "dataset_mixer": {"c/d": 1.0, "e/f": 0.25}}
    recipe |= {"dataset_splits": ["train_prefs", "test_prefs"], "eval_strategy": "steps"}
    imported = read(yaml.safe_dump(recipe), "dpo/a.yaml")
    assert imported.tree["model"]["path"] == "a/b@v2" and "model_revision=v2 -> model.path: a/b@v2" in imported.carried
    assert imported.tree["data"]["train"] == ["c/d::train_prefs", "e/f::train_prefs[:25%]"]
    assert imported.tree["data"]["eval"] == ["c/d::test_prefs", "e/f::test_prefs"]
    with pytest.raises(ConfigError, match="dataset_mixer: needs a config for each data set"):
        read(yaml.safe_dump(recipe | {"dataset_splits": ["all"]}), "dpo/a.yaml")


def test_processes_make_the_batches_of_a_recipe_fit(read: Read) -> None:
    text = f"{TRL}num_generations: 14\nper_device_train_batch_size: 16\nreward_funcs: [format]"
    assert read(text, processes=7).config.rollout.prompts_per_step == 8
    with pytest.raises(ConfigError, match=r"not a multiple of num_generations=14 .* with --processes N"):
        read(text)


def test_a_mixture_and_a_template_of_a_recipe(read: Read) -> None:
    mixture = {
        "datasets": [{"id": "a/b", "config": "c", "split": "dev", "weight": 0.5}, {"id": "d/e"}],
        "test_split_size": 9,
    }
    recipe = {"model_name_or_path": "m", "chat_template": "{{ x }}", "dataset_mixture": mixture, "max_seq_length": 77}
    imported = read(yaml.safe_dump(recipe), "sft/a.yaml")
    assert imported.tree["data"]["train"] == ["a/b:c:dev[:50%]", "d/e::train"]
    assert imported.files == {"a.jinja": "{{ x }}"} and imported.tree["data"]["chat_template"].endswith("a.jinja")
    assert imported.config.train.max_row_tokens == 77 and "test_split_size=9" in imported.to_do[0]


def test_flags_of_a_command_override_its_config(read: Read, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model_name_or_path: m\nbeta: 0.3\nlearning_rate: 1.0e-4\n")
    config = read("trl dpo --config c.yaml --learning_rate 1e-6 --use_peft").config
    assert (config.model.path, config.train.learning_rate) == ("m", 1e-6)
    assert config.model.lora is not None and config.model.lora.dropout == 0.0  # DPO switches every dropout off
    config = read("trl sft --model_name_or_path m --use_peft").config
    assert config.model.lora is not None and config.model.lora.dropout == 0.05


# ---- LLaMA-Factory and SkyRL ----


@pytest.mark.parametrize(("stage", "kind"), [("sft", "sft"), ("dpo", "preference"), ("rm", "reward-model")])
def test_a_stage_of_llama_factory_is_its_kind_of_run(stage: str, kind: str, read: Read) -> None:
    imported = read(f"{LLAMA}stage: {stage}\nfinetuning_type: full\ncutoff_len: 99\ntool_format: x")
    assert (imported.config.kind, imported.config.train.max_row_tokens) == (kind, 99)
    assert imported.tree["train"]["learning_rate"] == 5e-5 and imported.tree["model"]["dtype"] == "float32"
    assert [line.partition("=")[0] for line in imported.to_do if "=" in line] == ["dataset", "tool_format"]


@pytest.mark.parametrize(("info", "why"), [
    ('{"d": ', "is not valid JSON"), ("[1]", "has no 'd'"), ('{"d": 5}', "'d' is not a mapping"),
    ('{"d": {"file_name": ["a"]}}', "is not a text"), ('{"d": {"formatting": "odd"}}', "formatting=odd"),
])  # fmt: skip
def test_a_bad_dataset_info_is_named_and_the_rows_are_left_to_the_user(info: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(info)
    (tmp_path / "a.yaml").write_text(
        "do_train: true\nmodel_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: d\ndataset_dir: .\n"
    )
    imported = import_config(tmp_path / "a.yaml", "llamafactory")
    assert any("dataset_info.json" in line and why in line for line in imported.to_do)
    assert imported.tree["data"]["row_end"] == "template"


@pytest.mark.parametrize(("keys", "loss", "score", "likelihood"), [
    ("dpo_label_smoothing: 0.1", {"type": "sigmoid", "label_smoothing": 0.1}, ("log_ratio", False), 0.0),
    ("pref_loss: hinge\npref_ftx: 0.5", {"type": "hinge"}, ("log_ratio", False), 0.5),
    ("pref_loss: ipo", {"type": "ipo"}, ("log_ratio", True), 0.0),
    ("pref_loss: orpo\npref_ftx: 0.5", {"type": "odds_ratio"}, ("logprob", True), 1.5),
    ("pref_loss: simpo", {"type": "sigmoid", "target_margin": 0.5}, ("logprob", True), 0.0),
])  # fmt: skip
def test_a_preference_loss_of_llama_factory(
    keys: str, loss: dict[str, object], score: tuple[str, bool], likelihood: float, read: Read
) -> None:
    algorithm = read(f"{LLAMA}stage: dpo\nfinetuning_type: full\npref_beta: 0.3\n{keys}").tree["algorithm"]
    assert algorithm["loss"] == [{"label_smoothing": 0.0, **loss, "beta": 0.3} if "label" in str(loss) else {
        **loss, "beta": 0.3}]  # fmt: skip
    assert tuple(algorithm["score"].values()) == score
    assert algorithm["nll"] == {"type": "sequence_mean", "coefficient": likelihood}


def test_pretraining_is_on_blocks_of_text_and_packing_shortens_a_block(read: Read) -> None:
    imported = read(f"{LLAMA}stage: pt\nfinetuning_type: full\ncutoff_len: 99\nmax_length: 7")
    assert (imported.tree["sft"]["packing"], imported.config.train.max_row_tokens) == ("wrapped", 99)
    imported = read(f"{LLAMA}stage: sft\nfinetuning_type: full\ncutoff_len: 99\npacking: true\ntrain_on_prompt: true")
    sft = imported.tree["sft"]
    assert (sft["packing"], sft["train_on"], imported.config.train.max_row_tokens) == ("bfd", "all", 98)


INFO = """{
  "plain": {"file_name": "plain.json"},
  "named": {"hf_hub_url": "org/named", "subset": "s", "columns": {"prompt": "question", "response": "reply"}},
  "chat": {"file_name": "chat.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}},
  "pairs": {"file_name": "p.json", "ranking": true, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
  "labels": {"file_name": "l.json", "columns": {"prompt": "prompt", "response": "completion", "kto_tag": "ok"}},
  "text": {"file_name": "t.jsonl", "columns": {"prompt": "text"}},
  "films": {"file_name": "f.json", "formatting": "sharegpt", "columns": {"messages": "messages", "videos": "videos"}},
  "odd": {"file_name": "o.txt"}
}"""


@pytest.mark.parametrize(("stage", "names", "train", "columns", "left"), [
    ("sft", "plain, chat", ["plain.json", "chat.jsonl"], {}, ""),
    ("sft", "named", "org/named:s:train", {"data.prompt_field": "question", "sft.completion_field": "reply"}, ""),
    ("dpo", "pairs", "p.json", {"data.prompt_field": "q", "preference.chosen_field": "good",
                                "preference.rejected_field": "bad"}, ""),
    ("kto", "labels", "l.json", {"preference.label_field": "ok"}, ""),
    ("pt", "text", "t.jsonl", {}, ""),
    ("sft", "plain,named", ["plain", "named"], {}, "their rows have different columns"),
    ("sft", "pairs", "pairs", {}, "rows of pairs are pairs, and the stage is sft"),
    ("kto", "chat", "chat", {}, "of chat are not read as they are"),
    ("sft", "films", "films", {}, "of films are not read as they are"),
    ("sft", "odd", "odd", {}, "odd is o.txt; files are .json"), ("sft", "none", "none", {}, "has no 'none'"),
])  # fmt: skip
def test_a_data_set_of_llama_factory_is_found_with_its_columns(
    stage: str, names: str, train: object, columns: dict[str, str], left: str, read: Read, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(INFO)
    text = f"{LLAMA}stage: {stage}\nfinetuning_type: full".replace("dataset: mine", f"dataset: {names}")
    imported = read(text, "examples/a.yaml")
    found = imported.tree["data"]["train"]
    shown = [name.removeprefix(f"{tmp_path}/data/") for name in ([found] if isinstance(found, str) else found)]
    assert (shown[0] if isinstance(found, str) else shown) == train
    sections = {key.partition(".")[0]: imported.tree.get(key.partition(".")[0], {}) for key in columns}
    assert {key: sections[key.partition(".")[0]][key.partition(".")[2]] for key in columns} == columns
    assert left in "".join(imported.to_do) if left else not imported.to_do


@pytest.mark.parametrize("text", [
    f"{LLAMA}stage: sft\nfinetuning_type: lora\nquantization_bit: 4\nlora_target: all\nneat_packing: true\n"
    "cutoff_len: 9",
    "deepspeed --module openrlhf.cli.train_dpo --pretrain m --dataset d.jsonl --beta 0.2 --max_len 9 --zero_stage 3",
])  # fmt: skip
def test_the_report_has_the_names_of_the_file(text: str, read: Read) -> None:
    imported = read(text)
    lines = [*imported.carried, *imported.without_counterpart, *imported.to_do]
    names = [name for line in lines for name in re.findall(r"(?:^|, )([\w.]+)=", line.partition(" -> ")[0])]
    assert {*names} == {*re.findall(r"(?:^|--)(?!module)(\w+)(?=:| )", text, re.MULTILINE)} - {"deepspeed"}


def test_skyrl_counts_prompts_in_its_mini_batches(read: Read) -> None:
    keys = "trainer.policy_mini_batch_size=8 trainer.train_batch_size=16 generator.n_samples_per_prompt=4 "
    keys += "trainer.algorithm.dynamic_sampling.type=filter generator.eval_sampling_params.stop=x"
    imported = read(f': "${{N:=2}}"\n{SKYRL} {keys} trainer.placement.policy_num_gpus_per_node=$N', "a.sh")
    assert (imported.config.train.rows_per_update, imported.config.rollout.prompts_per_step) == (32, 16)
    assert (imported.gpus, imported.tree["algorithm"]["kl"]["coefficient"]) == (2, 0.001)
    assert imported.tree["algorithm"]["group_filter"] == "mixed_outcomes"
    assert [line.partition("=")[0] for line in imported.to_do] == ["generator.eval_sampling_params.stop"]


A = "trainer.algorithm."
OFF_POLICY = f"{A}off_policy_correction."


@pytest.mark.parametrize(("keys", "ratio", "clip", "more"), [
    ("", "token", {"type": "ppo", "low": 0.2, "high": 0.2, "dual": None}, {}),
    ("policy_loss_type=dual_clip", "token", {"type": "ppo", "low": 0.2, "high": 0.2, "dual": 3.0}, {}),
    ("policy_loss_type=gspo", "sequence_token", {"type": "ppo", "low": 0.2, "high": 0.2, "dual": None}, {}),
    ("policy_loss_type=sapo", "token", {"type": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}, {}),
    ("policy_loss_type=cispo", "token", {"type": "cispo", "low": 1.0, "high": 4.0}, {}),
    ("policy_loss_type=clip_cov", "token", {"type": "ppo", "low": 0.2, "high": 0.2, "dual": None},
     {"token_filter": {"type": "clip_cov", "fraction": 2e-4, "low": 1.0, "high": 5.0}}),
    ("policy_loss_type=kl_cov", "token", {"type": "none"},
     {"token_filter": {"type": "kl_cov", "fraction": 0.2, "coefficient": 1.0}}),
    (f"use_tis=true {A}tis_imp_ratio_cap=2", "token", None, {"rollout_is": [{"type": "token_tis", "high": 2.0}]}),
    (f"loss_reduction=prompt_mean {OFF_POLICY}tis_ratio_type=sequence {OFF_POLICY}sequence_mask_metric=geometric",
     "token", None, {"loss_agg": {"type": "prompt_mean"}, "rollout_is": [
         {"type": "sequence_tis", "high": 5.0}, {"type": "sequence_mask", "low": 0.99, "high": 1.01}]}),
    ("advantage_estimator=maxrl", "token", None, {"advantage": {"type": "maxrl", "eps": 1e-6}}),
])  # fmt: skip
def test_a_loss_of_skyrl(
    keys: str, ratio: str, clip: dict[str, object] | None, more: dict[str, object], read: Read
) -> None:
    algorithm = read(f"{SKYRL} trainer.seed=1 {A if keys else ''}{keys}").tree["algorithm"]
    assert algorithm["ratio"]["type"] == ratio
    assert clip in (None, algorithm["clip"])
    assert {key: algorithm[key] for key in more} == more


def test_dapo_of_skyrl_has_its_penalty_and_aimes_reward(read: Read, tmp_path: Path) -> None:
    program = SKYRL.replace("skyrl.train.entrypoints.main_base", "examples.train.algorithms.dapo.main_dapo")
    keys = "environment.env_class=aime generator.apply_overlong_filtering=true trainer.max_training_steps=10"
    imported = read(f"{program} {keys} trainer.policy.optimizer_config.num_warmup_steps=4")
    shaping = {"soft_overlong": True, "overlong_buffer_tokens": 512, "overlong_penalty": 1.0, "mask_truncated": True}
    assert (imported.tree["algorithm"]["shaping"], imported.tree["train"]["warmup_updates"]) == (shaping, 4)
    assert imported.tree["data"]["answer_field"] == "reward_model.ground_truth" and not imported.to_do
    (tmp_path / "a_rewards.py").write_text(imported.files["a_rewards.py"])
    reward = find_function(f"{tmp_path}/a_rewards.py:aime")
    texts = ["Answer: 3, no.\nAnswer: $\\boxed{1,024}$.", "answer : x = 1024", "1024", "Answer: 1024" + " " * 300]
    assert reward(completions=texts, ground_truth=["1024"] * 4) == [1.0, 1.0, -1.0, -1.0]


@pytest.mark.parametrize(("loss", "weight"), [
    ("rollout_is trainer.algorithm.eps_clip_high=4", {"type": "token_mis", "low": 0.8, "high": 5.0}),
    (f"cispo {A}cispo.cispo_anchor=rollout", {"type": "token_tis", "low": 0.0, "high": 5.0}),
])  # fmt: skip
def test_an_asynchronous_run_of_skyrl(loss: str, weight: dict[str, object], read: Read) -> None:
    program = SKYRL.replace("skyrl.train.entrypoints.main_base", "examples.train.fully_async.main_fully_async")
    keys = "trainer.fully_async.enabled=true trainer.train_batch_size=8 trainer.policy_mini_batch_size=8"
    imported = read(f"{program} {keys} {A}policy_loss_type={loss}")
    assert imported.config.asynchronous is not None and imported.config.asynchronous.max_staleness == 4
    algorithm = imported.tree["algorithm"]
    assert (algorithm["clip"], algorithm["rollout_is"]) == ({"type": "reinforce"}, [weight])


def test_a_script_that_starts_another_is_read_with_its_arguments(read: Read, tmp_path: Path) -> None:
    (tmp_path / "base.sh").write_text(
        f': "${{N:=4}}"\n{SKYRL} trainer.epochs=$N trainer.seed=$SEED trainer.run_name=$1 "$@"\n'
    )
    text = "export SEED=7\nN=3 bash runs/base.sh trainer.epochs=2 trainer.run_name='a b' trainer.ckpt_interval=$N"
    (tmp_path / "runs").mkdir()
    (tmp_path / "base.sh").rename(tmp_path / "runs" / "base.sh")
    imported = read(f"N=9\n{text}", "scripts/a.sh", "skyrl")
    config = imported.config
    assert (config.train.total_epochs, config.seed, config.run_name) == (2, 7, "a b")
    assert config.checkpoint.every_steps == 9
    assert "a.sh starts runs/base.sh, which is read with its arguments" in imported.approximated
    (tmp_path / "runs" / "base.sh").write_text(f"{SKYRL} \\\n  trainer.epoch=2 $@\n")
    with pytest.raises(ConfigError, match=r"runs/base\.sh:2: SkyRL has no key 'trainer.epoch'; .* 'trainer.epochs'"):
        read(text, "scripts/a.sh", "skyrl")


def test_pictures_are_those_of_their_column(read: Read) -> None:
    verl = read(f"{PPO} data.image_key=pics actor_rollout_ref.rollout.limit_images=4")
    assert (verl.tree["data"]["images_field"], verl.tree["model"]["freeze_vision"]) == ("pics", False)
    adapted = read(f"{PPO} data.image_key=images actor_rollout_ref.model.lora_rank=8")
    assert "freeze_vision" not in adapted.tree["model"]
    openrlhf = f"{OPENRLHF} --reward.remote_url r.py --data.image_key images --actor.freeze_visual_encoder"
    assert read(openrlhf).tree["model"]["freeze_vision"] is True
    old_verl = f"{PPO} actor_rollout_ref.actor.ppo_micro_batch_size=4"
    for script in (f"{SFT} data", f"{old_verl} data", f"{OPENRLHF_SFT} --data"):
        with pytest.raises(ConfigError, match=r"data\.image_key=pics .*pictures are not translated"):
            read(f"{script}.image_key=pics")
    llama = read(f"{LLAMA}stage: sft\nfinetuning_type: full\nimage_max_pixels: 9000")
    assert (llama.tree["data"]["max_pixels"], llama.tree["data"]["min_pixels"]) == (9000, 1024)
    assert llama.tree["model"]["freeze_vision"] is True
    for keys, frozen in (("", False), (" trainer.policy.model.lora.rank=8", None)):
        skyrl = read(f"{SKYRL} generator.vision_language_generator=true{keys}")
        assert skyrl.tree["model"].get("freeze_vision") is frozen and not skyrl.to_do
    alone = read(f"{SKYRL} trainer.policy.language_model_only=true").tree["model"]
    assert "freeze_vision" not in alone


def test_the_keys_that_are_read_are_keys_of_the_library() -> None:
    moved = [name for name, _ in skyrl.MOVES.values() if isinstance(name, str)]
    of_skyrl = {*skyrl.DEFAULTS, *skyrl.REASONS, *skyrl.REFUSED, *moved}
    of_llama = {*llamafactory.RENAMED, *llamafactory.REFUSED, *llamafactory.GENERATION, *llamafactory.REASONS}
    for read, known in ((of_skyrl, names.SKYRL), (of_llama - {"generate."}, names.LLAMA_FACTORY)):
        assert len(known) > 300
        assert not [name for name in read if name not in known
                    and not (name.endswith((".", "_")) and any(one.startswith(name) for one in known))]  # fmt: skip
