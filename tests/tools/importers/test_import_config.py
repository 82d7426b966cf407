"""Configs and scripts in the formats of verl, TRL and OpenRLHF, and what they mean there."""

from pathlib import Path

import pytest

from atomrl.config import ConfigError
from atomrl.tools.importers import Imported, import_config

FILES = Path(__file__).with_name("files")
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
MAIN = "python3 -m verl.trainer.main_ppo"
VERL = f"{MAIN} algorithm.adv_estimator=grpo data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4"
ACTOR = "actor_rollout_ref.actor."
GRPO_YAML = "num_generations: 8\nreward_funcs: a.b"
MODEL = "--actor.model_name_or_path m --reward.model_name_or_path r "
MODEL += "--data.prompt_dataset d.jsonl --algo.advantage.estimator reinforce"
FILTER = f"--algo.dynamic_filtering_enable {MODEL}"
TIS_ON = "--enable_vllm_is_correction"


def read(name: str, **more: int) -> Imported:
    return import_config(FILES / name, name.partition("_")[0], **more)


def test_processes_multiply_trls_batches() -> None:
    config = read("trl_cispo.sh", processes=8).config
    assert (config.rollout.prompts_per_step, config.train.rows_per_update) == (128 // 8, 2 * 8 * 8)
    with pytest.raises(ConfigError, match="option for TRL"):
        read("verl_dapo.sh", processes=8)


def trl(tmp_path: Path, flags: str, launcher: str = "") -> Imported:
    words = f"{launcher} -m trl.scripts.grpo --model_name_or_path m --dataset_name d --reward_funcs a.b {flags}"
    words = words.replace("--reward_funcs a.b", "") if "--reward_funcs" in flags else words
    return import_config(written(tmp_path, "a.sh", words), "trl")


def test_processes_of_several_machines(tmp_path: Path) -> None:
    def rows(launcher: str) -> int | None:
        return trl(tmp_path, "", launcher).config.train.rows_per_update

    assert rows("torchrun --nnodes 2 --nproc-per-node 4") == rows("accelerate launch --num_processes 8") == 8 * 8
    (tmp_path / "zero3.yaml").write_text("num_processes: 4\ndistributed_type: DEEPSPEED\n")
    assert rows("accelerate launch --config_file zero3.yaml") == 4 * 8
    several = trl(tmp_path, "", "torchrun --nproc_per_node gpu")
    assert several.config.train.rows_per_update == 8 and several.report().startswith(
        "1 GPU: the script does not set the number"
    )


def losses(tmp_path: Path, text: str) -> tuple[list[dict[str, object]], Imported]:
    imported = import_config(written(tmp_path, "a.sh", f"trl dpo --model_name_or_path m {text}"), "trl")
    return imported.tree["algorithm"]["loss"], imported


def test_every_loss_of_trl_s_dpo_has_ours(tmp_path: Path) -> None:
    for kind in (
        "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
        "discopop", "sigmoid_norm",
    ):  # fmt: skip
        [loss], imported = losses(tmp_path, f"--loss_type {kind} --beta 0.2")
        assert (loss["type"], loss["beta"]) == (kind.removesuffix("_norm"), 0.2)
        assert imported.tree["algorithm"]["score"].get("length_normalised", False) == (kind in ("ipo", "sigmoid_norm"))
    [loss], _ = losses(tmp_path, "--loss_type robust --label_smoothing 0.1")
    assert loss["label_smoothing"] == 0.1
    [loss], imported = losses(tmp_path, "--label_smoothing 0.1")
    assert "label_smoothing" not in loss and "which is cDPO" in imported.report()


def test_a_divergence_of_trl_s_dpo_is_the_score_s(tmp_path: Path) -> None:
    _, imported = losses(tmp_path, "--f_divergence_type alpha_divergence")
    assert imported.tree["algorithm"]["score"] == {"type": "log_ratio", "divergence": "alpha_divergence", "alpha": 0.5}


def test_the_library_is_recognised_or_asked_for(tmp_path: Path) -> None:
    def kind(name: str, text: str, trainer: str | None = None) -> str:
        return import_config(written(tmp_path, name, text), "trl", trainer=trainer).config.kind

    flags = "--model_name_or_path m --learning_rate 1e-5"
    for words in ("trl dpo", "python -m trl.scripts.dpo", "accelerate launch --num_processes 2 trl/scripts/dpo.py"):
        assert kind("a.sh", f"{words} {flags}") == "preference"
    assert kind("a.yaml", "model_name_or_path: m\npacking: true") == "sft"
    assert kind("a.yaml", "model_name_or_path: m\nbeta: 0.1", "dpo") == "preference"
    assert kind("a.sh", "trl sft --model_name_or_path m\ntrl dpo --model_name_or_path n", "dpo") == "preference"
    (tmp_path / "dpo").mkdir()
    assert kind("dpo/config.yaml", "model_name_or_path: m\nbeta: 0.1") == "preference"
    for name, text, trainer in (
        ("a.yaml", "model_name_or_path: m\nbeta: 0.1", None),
        ("a.sh", "trl sft --model_name_or_path m\ntrl dpo --model_name_or_path n", None),
    ):
        with pytest.raises(ConfigError, match="--trainer"):
            kind(name, text, trainer)
    with pytest.raises(ConfigError, match="--trainer"):
        import_config(FILES / "verl_dapo.sh", "verl", trainer="dpo")


def test_the_tokens_that_trl_sft_trains_on_are_reported(tmp_path: Path) -> None:
    text = "trl sft --model_name_or_path m --packing --dataset_text_field text"
    imported = import_config(written(tmp_path, "a.sh", text), "trl")
    assert imported.tree["sft"]["packing"] and "sft.train_on" in imported.report()


def test_a_reward_model_comes_before_the_functions_as_its_weight_does(tmp_path: Path) -> None:
    given = "--reward_funcs accuracy_reward pkg.f --reward_model_name_or_path org/rm"
    functions = trl(tmp_path, f"{given} --reward_weights 0.5 2.0 1.0").tree["reward"]["functions"]
    assert [(one["function"], one.get("weight", 1.0)) for one in functions] == [
        ("reward_model", 0.5), ("boxed", 2.0), ("pkg.f", 1.0),
    ]  # fmt: skip
    [one] = trl(tmp_path, "--reward_funcs pkg.f --reward_weights 0.5").tree["reward"]["functions"]
    assert one == {"function": "pkg.f", "completions": "messages", "weight": 0.5}
    with pytest.raises(ConfigError, match="has 2 weights for 3 rewards"):
        trl(tmp_path, f"{given} --reward_weights 0.5 2.0")


def test_counts_over_several_optimizer_steps_are_reported(tmp_path: Path) -> None:
    imported = trl(tmp_path, "--steps_per_generation 4 --eval_strategy steps --logging_steps 20")
    assert "those of 4 optimizer steps" in str(imported.differences) and imported.config.eval.every_steps == 5


@pytest.mark.parametrize(
    ("rejections", "thresholds", "message"),
    [
        ("seq_mean_k3,token_k3", "0.1,0.2,0.3", "names 2, and rollout_rs_threshold=0.1,0.2,0.3 has 3 thresholds"),
        ("seq_mean_k3", None, "rollout_rs needs a number above 0 .* not None"),
        ("seq_mean_k1", "0.5_much", "rollout_rs needs a number above 0 .* not much"),
        ("seq_mean_k1", "0", "rollout_rs needs a number above 0 .* not 0"),
    ],
)
def test_thresholds_of_rejections_that_verl_could_not_take_are_named(
    tmp_path: Path, rejections: str, thresholds: str | None, message: str
) -> None:
    name = "algorithm.rollout_correction.rollout_rs"
    text = f"{MAIN} algorithm.adv_estimator=grpo {name}={rejections}"
    text += f" {name}_threshold={thresholds}" if thresholds else ""
    with pytest.raises(ConfigError, match=message):
        import_config(written(tmp_path, "a.sh", text), "verl")


def test_a_key_of_wandb_is_a_secret(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    imported = read("openrlhf_reinforce_pp.sh")
    assert imported.config.tracking.sinks == ["wandb"]
    assert "SECRET" not in imported.report() + imported.yaml()


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("library", "name", "text", "message"),
    [
        ("verl", "a.sh", f"{MAIN} algorithm.adv_estimator=optimal_token_baseline", "adv_estimator"),
        ("verl", "a.sh", f"{MAIN} {LOSS_MODE}=new algorithm.adv_estimator=grpo", "gspo"),
        ("verl", "a.sh", "echo 'nothing here'", "no command with key=value"),
        ("verl", "a.yaml", "data: {train: a.jsonl}\nalgorithm: {name: grpo}", "not a config of verl"),
        ("verl", "a.sh", 'run a.b="never closed', "unclosed quote"),
        (
            "verl",
            "a.sh",
            f"{MAIN} algorithm.use_kl_in_reward=true actor_rollout_ref.actor.use_kl_loss=true",
            "one of the two",
        ),
        *(
            ("trl", "a.sh", f"trl {flags}", message)
            for flags, message in (
                ("grpo --loss_type luspo", "loss_type=luspo"),
                ("grpo --loss_type cispo", "epsilon_high"),
                ("grpo --num_generations 16", "not a multiple of num_generations=16"),
                ("grpo --use_adaptive_entropy", "use_adaptive_entropy=True"),
                ("grpo --epsilon wide", "epsilon=wide is not a number"),
                ("grpo --num_generations 2.5", "num_generations=2.5 is not a whole number"),
                ("grpo --model_name_or_path m --beta 0.1", "names no reward"),
                ("sft --loss_type dft", "loss_type=dft"),
                ("dpo --loss_type ipo sigmoid", "a run has one score"),
                ("dpo --loss_type sft", "SFT"),
                ("dpo --loss_type new", "loss_type=new"),
                ("dpo --loss_type sigmoid hinge --loss_weights 1.0", "not 2 numbers"),
                ("dpo --use_weighting", "use_weighting=True"),
                ("dpo --loss_type apo_zero --f_divergence_type forward_kl", "apo_zero"),
                ("dpo --truncation_mode keep_end", "keep_end"),
                ("reward --use_peft", "use_peft=True"),
                ("sft --config none.yaml", "--config none.yaml is not there"),
            )
        ),
        ("verl", "a.sh", f"{MAIN} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$N", "rollout.n"),
        (
            "verl",
            "a.sh",
            f"{MAIN} algorithm.adv_estimator=grpo algorithm.rollout_is=True",
            "rollout_correction.rollout_is",
        ),
        ("openrlhf", "a.yaml", "beta: 1", "give the script"),
        ("openrlhf", "a.sh", f"train_ppo_ray {MODEL} --agent_func_path agent.py", "agent_func_path=agent.py"),
        ("openrlhf", "a.sh", f"train_ppo_ray {MODEL} --vllm_is_truncated_threshold 2 {TIS_ON}", "not 2 numbers"),
        ("openrlhf", "a.sh", f"train_ppo_ray {MODEL} --policy_loss_type gspo {TIS_ON}", "is_correction_enable"),
        ("openrlhf", "a.sh", f"train_ppo_ray {FILTER} --algo.dynamic_filtering_range 0.1 0.9", "0.1, 0.9"),
        ("verl", "a.sh", f"{VERL} {ACTOR}use_kl_loss=$KL", r"use_kl_loss=\$KL is neither true nor false"),
        (
            "verl",
            "a.yaml",
            "actor_rollout_ref: {actor: {use_kl_loss: '${oc.env:KL}'}}\nalgorithm: {adv_estimator: grpo}",
            "use_kl_loss=.*neither true nor false",
        ),
        ("verl", "a.sh", f"{VERL} algorithm.kl_ctrl.type=$T algorithm.use_kl_in_reward=true", "kl_ctrl.type"),
        ("verl", "a.sh", f"{VERL} {ACTOR}optim.betas=[0.9]", "betas"),
        (
            "verl",
            "a.sh",
            f"{VERL} reward_model.overlong_buffer.enable=True",
            "overlong_buffer.len=None is not a number",
        ),
        ("verl", "a.sh", f"{VERL} {ACTOR}loss_agg_mode=[token-mean]", "loss_agg_mode"),
        (
            "verl",
            "a.sh",
            f"{VERL} {ACTOR}loss_agg_mode=seq-mean-token-sum-norm {ACTOR}loss_scale_factor=abc",
            "loss_scale_factor=abc is not a number",
        ),
        *(
            ("trl", "a.yaml", f"{GRPO_YAML}\n{key}: {value}", key)
            for key, value in (
                ("num_iterations", 0),
                ("per_device_train_batch_size", 0),
                ("loss_type", "[grpo]"),
                ("warmup_steps", "abc"),
                ("temperature", "true"),
                ("use_vllm", "'$VLLM'"),
            )
        ),
        ("trl", "a.yaml", "num_generations: 0", "num_generations=0 is not at least 1"),
        ("trl", "a.yaml", "num_generations: 8\nreward_funcs: 3", "a.yaml cannot be read"),
        ("trl", "a.yaml", f"{GRPO_YAML}\nreport_to: 5", "a.yaml cannot be read"),
        ("openrlhf", "a.sh", f"train_ppo_ray {MODEL} --init_kl_coef abc", "init_coef=abc is not a number"),
        ("openrlhf", "a.sh", f"train_ppo_ray {MODEL} --temperature", "temperature=True is not a number"),
        ("openrlhf", "a.sh", f"train_ppo_ray {MODEL} --use_kl_loss $KL", "neither true nor false"),
    ],
)
def test_what_it_refuses(library: str, name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        import_config(written(tmp_path, name, text), library)


@pytest.mark.parametrize(("library", "name", "text", "message"), [
    ("trl", "a.yaml", f"{GRPO_YAML}\ntemperature: hot", r"a\.yaml:\d+: TRL's temperature=hot"),
    ("trl", "a.yaml", f"{GRPO_YAML}\nmodel: m\nlearning_rate: -1", r"train.learning_rate.*from .*a\.yaml:4: TRL's"),
    ("verl", "a.sh", f"{VERL} \\\n  {ACTOR}optim.lr=abc", r"a\.sh:2: verl's actor_rollout_ref.actor.optim.lr=abc"),
    ("verl", "a.yaml", "actor_rollout_ref:\n  rollout:\n    n: many\n", r"a\.yaml:3: verl's .*=many"),
    ("openrlhf", "a.sh", f"train_ppo_ray {MODEL} \\\n --rollout.temperature hot", r"a\.sh:2: OpenRLHF's .*=hot"),
])  # fmt: skip
def test_a_value_that_is_wrong_is_named_with_file_and_line(
    library: str, name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        import_config(written(tmp_path, name, text), library)


@pytest.mark.parametrize(("library", "name", "text", "engine"), [
    ("trl", "a.yaml", "", "auto"),
    ("trl", "a.yaml", "use_vllm: true", "auto"),
    ("verl", "a.sh", "", "auto"),
    ("verl", "a.sh", "actor_rollout_ref.rollout.name=vllm", "auto"),
    ("verl", "a.sh", "actor_rollout_ref.rollout.name=sglang", "sglang"),
    ("verl", "a.sh", "actor_rollout_ref.rollout.name=hf", "hf"),
    ("openrlhf", "a.sh", "", "auto"),
])  # fmt: skip
def test_the_engine_is_chosen_where_the_run_is_unless_the_source_names_another(
    library: str, name: str, text: str, engine: str, tmp_path: Path
) -> None:
    given = {
        "trl": f"{GRPO_YAML}\nmodel_name_or_path: m\n{text}",
        "verl": f"{VERL} {text}",
        "openrlhf": f"train_ppo_ray {MODEL}",
    }
    tree = import_config(written(tmp_path, name, given[library]), library).tree
    assert tree["rollout"]["engine"] == engine


def test_an_earlier_verl_s_bound_of_ratios_is_ours(tmp_path: Path) -> None:
    verl = f"{VERL} actor_rollout_ref.model.path=m {ACTOR}tis_imp_ratio_cap=2"
    tree = import_config(written(tmp_path, "a.sh", verl), "verl").tree
    assert tree["algorithm"]["rollout_is"] == [{"type": "token_tis", "high": 2.0}]


def test_files_of_prompts_are_a_list_and_a_hub_s_name_stays(tmp_path: Path) -> None:
    for given, train in (
        ("a.jsonl,b.jsonl", ["a.jsonl", "b.jsonl"]),
        ("Org/prompts-v0.1", "Org/prompts-v0.1::train"),
        ("Org/sums --prompt_split test[:9]", "Org/sums::test[:9]"),
        ("./rows", "./rows"),
    ):
        imported = import_config(written(tmp_path, "a.sh", f"train_ppo_ray {MODEL} --prompt_data {given}"), "openrlhf")
        assert imported.tree["data"]["train"] == train and not any("download" in line for line in imported.approximated)


def test_what_trl_s_flags_name_on_the_hub(tmp_path: Path) -> None:
    flags = "--dataset_name a/b --dataset_config c --dataset_test_split dev --eval_strategy steps"
    data = import_config(written(tmp_path, "a.sh", f"trl sft --model_name_or_path m {flags}"), "trl").tree["data"]
    assert (data["train"], data["eval"]) == ("a/b:c:train", "a/b:c:dev")
    mixed = "model_name_or_path: m\ndatasets:\n- {path: a/b, split: train}\n- {path: c/d, name: e}\npacking: false\n"
    data = import_config(written(tmp_path, "a.yaml", mixed), "trl").tree["data"]
    assert data["train"] == ["a/b::train", "c/d:e:train"]


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04\xff")
    with pytest.raises(ConfigError, match="is a pickle"):
        import_config(tmp_path / "training_args.bin", "openrlhf")


def test_nothing_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    keys = "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4 algorithm.adv_estimator=grpo"
    script = f"N=$(touch {marker}; echo 4)\nM=`touch {marker}`\n"
    script += f"{MAIN} {keys} trainer.project_name=$N a.b=$(touch {marker})\n"
    imported = import_config(written(tmp_path, "a.sh", script), "verl")
    assert not marker.exists()
    assert "$(touch" in imported.config.tracking.wandb_project


def test_commands_on_one_line_are_several(tmp_path: Path) -> None:
    text = f"{VERL} trainer.project_name=a && {VERL} {ACTOR}use_kl_loss=true"
    assert import_config(written(tmp_path, "a.sh", text), "verl").config.tracking.wandb_project == "a"


def test_quotes_of_a_value_that_do_not_close_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.sh.*\$N.*No closing"):
        import_config(written(tmp_path, "a.sh", 'N="it\'s"\nrun a.b=$N'), "verl")


def test_a_constant_schedule_warms_up_only_where_it_says_so(tmp_path: Path) -> None:
    for schedule, warmup in (("constant", 0.0), ("constant_with_warmup", 0.1)):
        text = f"{GRPO_YAML}\nmodel_name_or_path: m\nlr_scheduler_type: {schedule}\nwarmup_ratio: 0.1"
        assert import_config(written(tmp_path, "a.yaml", text), "trl").config.train.warmup_ratio == warmup
        text = f"train_ppo_ray {MODEL} --lr_scheduler {schedule} --lr_warmup_ratio 0.1"
        imported = import_config(written(tmp_path, "a.sh", text), "openrlhf")
        assert imported.config.train.warmup_ratio == warmup and imported.config.train.schedule == "constant"


def test_the_limit_of_prompts_that_trl_s_grpo_has_or_has_not_is_said(tmp_path: Path) -> None:
    text = f"{GRPO_YAML}\nmodel_name_or_path: m"
    assert "longest prompt: TRL no limit; here 512" in import_config(written(tmp_path, "a.yaml", text), "trl").yaml()
    data = import_config(written(tmp_path, "a.yaml", f"{text}\nmax_prompt_length: 9"), "trl").config.data
    assert (data.max_prompt_tokens, data.overlong_prompt) == (9, "truncate")


def test_a_flag_with_no_before_it_is_off(tmp_path: Path) -> None:
    flags = "--model_name_or_path m --num_generations 8 --reward_funcs a.b --no_bf16 --no-gradient_checkpointing"
    text = f"trl vllm-serve --model m --a 1 --b 2 --c 3 --d 4 --e 5 --f 6 &\ntrl grpo {flags}"
    model = import_config(written(tmp_path, "a.sh", text), "trl").config.model
    assert (model.path, model.dtype, model.gradient_checkpointing) == ("m", "float32", False)


def test_commands_that_were_not_taken_are_counted(tmp_path: Path) -> None:
    trl = "trl grpo --model_name_or_path a --num_generations 8 --reward_funcs a.b\ntrl grpo --model_name_or_path b"
    for library, script in (
        ("verl", f"{VERL}\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"),
        ("trl", trl),
    ):
        said = import_config(written(tmp_path, "a.sh", script), library).yaml()
        assert "a.sh has 2 such commands; the one with the most keys was used" in said


def test_trl_options_by_epoch_are_reported(tmp_path: Path) -> None:
    text = (
        f"{GRPO_YAML}\nmodel_name_or_path: m\neval_strategy: epoch\nsave_strategy: epoch\nreport_to: [comet_ml, wandb]"
    )
    imported = import_config(written(tmp_path, "a.yaml", text), "trl")
    assert imported.config.tracking.sinks == ["wandb"] and "report_to: comet_ml has no counterpart" in imported.yaml()
    for name, key in (("eval_strategy", "eval.every_steps"), ("save_strategy", "checkpoint.every_steps")):
        assert f"{name}=epoch (here it is by steps: {key})" in imported.yaml()


def test_no_logger_of_verl_is_no_tracker(tmp_path: Path) -> None:
    text = f"{VERL} trainer.logger=null"
    assert import_config(written(tmp_path, "a.sh", text), "verl").config.tracking.sinks == []


def test_references_of_a_yaml_file_are_followed(tmp_path: Path) -> None:
    text = """
        actor_rollout_ref: {actor: {use_kl_loss: "${algorithm.use_kl}", kl_loss_coef: "${algorithm.kl}"}}
        algorithm: {adv_estimator: grpo, use_kl: "${switch}", kl: 0.25}
        trainer: {project_name: p, experiment_name: "${trainer.project_name}-x", default_local_dir: "${oc.env:HOME}/o"}
        switch: false
    """
    for on, coefficient in (("false", 0.0), ("true", 0.25)):
        imported = import_config(written(tmp_path, "a.yaml", text.replace("switch: false", f"switch: {on}")), "verl")
        assert imported.tree["algorithm"]["kl"]["coefficient"] == coefficient
    assert imported.config.run_name == "p-x"
    assert "trainer.default_local_dir=${oc.env:HOME}/o was copied as written" in imported.approximated


def test_one_name_of_a_module_is_a_list_of_one(tmp_path: Path) -> None:
    for name, text in (("a.yaml", f"{GRPO_YAML}\nmodel_name_or_path: m\nuse_peft: true\nlora_target_modules: q_proj"),):
        model = import_config(written(tmp_path, name, text), "trl").config.model
        assert model.lora and model.lora.target_modules == ["q_proj"]


VERL_RUN = f"{MAIN} algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m"
VERL_YAML = "trainer: {}\nactor_rollout_ref: {model: {path: m}}\nalgorithm: {adv_estimator: grpo}\ndata:"
TRL_RUN = "trl grpo --model_name_or_path m --reward_funcs a.b"
KWARGS = "data.apply_chat_template_kwargs"
OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("library", "name", "text", "variables"),
    [
        ("verl", "a.sh", f"{VERL_RUN} +{KWARGS}.enable_thinking=False", OFF),
        ("verl", "a.sh", f"{VERL_RUN} '+{KWARGS}={{enable_thinking:False}}'", OFF),
        ("verl", "a.sh", f"{VERL_RUN} '{KWARGS}={{reasoning_effort: low}}'", {"reasoning_effort": "low"}),
        ("verl", "a.yaml", f"{VERL_YAML}\n  apply_chat_template_kwargs: {{enable_thinking: false}}", OFF),
        (
            "trl",
            "a.yaml",
            f"{GRPO_YAML}\nmodel_name_or_path: m\nchat_template_kwargs: {{a: 1, b: x}}",
            {"a": 1, "b": "x"},
        ),
        ("trl", "a.sh", TRL_RUN + " --chat_template_kwargs '{\"enable_thinking\": false}'", OFF),
        ("trl", "a.sh", TRL_RUN, {}),
    ],
)
def test_variables_of_the_chat_template_are_ours(
    library: str, name: str, text: str, variables: dict[str, object], tmp_path: Path
) -> None:
    imported = import_config(written(tmp_path, name, text), library)
    assert imported.config.data.chat_template_kwargs == variables
    assert not any("kwargs" in line for line in imported.without_counterpart)


@pytest.mark.parametrize(
    ("library", "text"),
    [
        ("verl", f"{VERL_RUN} actor_rollout_ref.model.custom_chat_template=x"),
        ("trl", "trl sft --model_name_or_path m --chat_template_path qwen.jinja"),
        ("openrlhf", f"python3 -m openrlhf.cli.train_ppo_ray {MODEL} --data.tokenizer_chat_template x"),
        ("openrlhf", f"python3 -m openrlhf.cli.train_ppo_ray {MODEL} --tokenizer_chat_template x"),
        ("trl", f"{TRL_RUN} --chat_template_kwargs $KWARGS"),
    ],
)
def test_another_chat_template_is_refused(library: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        import_config(written(tmp_path, "a.sh", text), library)
