"""TRL's Python scripts: what is read of their text, and what is copied out of them. None of it is run."""

import dataclasses
import json
import re
import textwrap
from pathlib import Path

import pytest
from transformers import TrainingArguments

from atomrl.cli.main import main
from atomrl.common.functions import find_function
from atomrl.config import ConfigError
from atomrl.tools.importers import Imported, import_config


def imported(tmp_path: Path, text: str) -> dict:
    path = tmp_path / "train.py"
    path.write_text(f"{text}\nGRPOTrainer('m')\n")
    return import_config(path, "trl").tree


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("GRPOConfig('out', learning_rate=2e-6 * 2)", 4e-6),
        ("scale = 2\nrate = 2e-6 * scale\nGRPOConfig('out', learning_rate=rate)", 4e-6),
        ("kw = {'learning_rate': 4e-6}\nGRPOConfig('out', **kw)", 4e-6),
        ("GRPOConfig('out', **{'learning_rate': 4e-6})", 4e-6),
        ("a = GRPOConfig('out', learning_rate=1e-6)\na.learning_rate = 4e-6", 4e-6),
        ("def main():\n    a: GRPOConfig = GRPOConfig('out')\n    a.learning_rate = 4e-6", 4e-6),
        ("b = Other()\nb.learning_rate = 1\na = GRPOConfig('out', learning_rate=4e-6)", 4e-6),
        ("def main():\n    GRPOConfig('out', learning_rate=4e-6)\nGRPOConfig('out', learning_rate=1e-6)", 4e-6),
    ],
)
def test_expressions_of_literals_are_read(text: str, rate: float, tmp_path: Path) -> None:
    assert imported(tmp_path, text)["train"]["learning_rate"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nGRPOConfig('out', loss_type=os.environ['LOSS'])", r"train.py:2: GRPOConfig\(loss_type=os.environ"),
        ("GRPOConfig('out', num_generations=int(n))", r"train.py:1: GRPOConfig\(num_generations=int\(n\)\)"),
        ("GRPOConfig('out', beta=1 / 0)", r"train.py:1: GRPOConfig\(beta=1 / 0\)"),
        ("GRPOConfig('out', **read())", r"train.py:1: GRPOConfig\(\*\*=\*read\(\)\)"),
        ("a = GRPOConfig('out')\nif x:\n    a.beta = 0.1", "train.py:3: a.beta = 0.1: known only when it runs"),
        ("a = GRPOConfig('out')\na.beta *= 2", r"train.py:2: a.beta \*= 2: known only"),
        ("a = GRPOConfig('out')\nsetattr(a, 'beta', 0.1)", r"train.py:2: setattr\(a, 'beta', 0.1\): known only"),
        ("a = GRPOConfig('out')\nb = dataclasses.replace(a, beta=0.1)", r"train.py:2: dataclasses.replace\(a"),
        ("def f(rate):\n    return GRPOConfig('out', learning_rate=rate)\nrate = 1e-6", r"train.py:2: GRPOConfig\(lea"),
        ("rate = 1e-6\nn, rate = 4, 3e-6\nGRPOConfig('out', learning_rate=rate)", r"train.py:3: GRPOConfig\(lea"),
        ("GRPOTrainer('m', peft_config=LoraConfig(r=ranks[0]))", r"train.py:1: LoraConfig\(r=ranks\[0\]\)"),
    ],
)  # fmt: skip
def test_values_known_only_at_run_time_are_errors_with_their_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, text)


def test_output_folders_may_be_known_only_at_run_time(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nGRPOConfig(sys.argv[1], report_to=[t for t in trackers])\nGRPOTrainer('m')")
    said = import_config(path, "trl")
    assert any("train.py:2: GRPOConfig(output_dir=sys.argv[1]) is not a literal" in line for line in said.approximated)


def read(
    tmp_path: Path, text: str, trainer: str = "GRPOTrainer", command: tuple[str, ...] = (), **given: str
) -> Imported:
    """A script with a trainer behind some lines, imported; `given` are the trainer's arguments."""
    arguments = {"model": "'m/m'"} | ({"reward_funcs": "f"} if trainer == "GRPOTrainer" else {}) | given
    head = "def f(completions, **kwargs):\n    return [0.0 for _ in completions]\n\n"
    call = ", ".join(f"{name}={value}" for name, value in arguments.items())
    path = tmp_path / "train.py"
    path.write_text(f"{head}{textwrap.dedent(text)}\n{trainer}({call}).train()\n")
    return import_config(path, out=tmp_path / "ours.yaml", command=command)


@pytest.mark.parametrize(("text", "value"), [
    ('"a" + "/b"', "a/b"), ('f"{A}/{N:02d}"', "x/03"), ('os.path.join("a", A)', "a/x"), ("A", "x"),
    ('os.environ.get("MODEL", "a/b")', "a/b"), ('"big/one" if False else "b"', None), ("NAMES[1]", "q"),
    ('f"{N:999999999}"', None), ("2 ** 10 ** 9", None), ('SIZES["small"]', "s"), ("pick()", None),
    ("str(Path('a') / 'b')", "a/b"), ("names[0]", None),
])  # fmt: skip
def test_texts_that_only_the_text_says(text: str, value: str | None, tmp_path: Path) -> None:
    head = 'import os\nA = "x"\nN = 3\nNAMES = ["p", "q"]\nSIZES = {"small": "s"}'
    if value is None:
        with pytest.raises(ConfigError, match=r"train.py:\d+: GRPOTrainer\(model="):
            read(tmp_path, head, model=text)
    else:
        assert read(tmp_path, head, model=text).tree["model"]["path"] == value


def test_a_name_that_a_condition_sets_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.py:7"):
        read(tmp_path, "name = 'a'\nif x:\n    name = 'b'", model="name")
    assert read(tmp_path, "name = 'a'\nname = 'b'", model="name").tree["model"]["path"] == "b"


def test_a_model_in_a_variable(tmp_path: Path) -> None:
    text = """
        NAME = "org/model"
        model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="sdpa", device_map="auto", use_cache=0)
        model.config.use_cache = False
        tokenizer = AutoTokenizer.from_pretrained("org/other")
        tokenizer.pad_token = tokenizer.eos_token
    """
    rows = "load_dataset('x/y', split='train')"
    imported = read(tmp_path, text, model="model", processing_class="tokenizer", train_dataset=rows)
    model = imported.tree["model"]
    assert (model["path"], model["tokenizer"], model["dtype"]) == ("org/model", "org/other", "bfloat16")
    names = {line.partition("=")[0] for line in imported.without_counterpart}
    assert not imported.to_do and names == {"attn_implementation", "device_map", "use_cache"}


def test_a_reward_model_has_one_score(tmp_path: Path) -> None:
    text = (
        "model = AutoModelForSequenceClassification.from_pretrained('a/b', num_labels=LABELS)\n"
        + """
from trl import RewardTrainer
trainer = RewardTrainer(model, train_dataset=load_dataset("c/d", split="train"))
trainer.add_callback(Mine())
"""
    )
    (tmp_path / "one.py").write_text(text.replace("LABELS", "1"))
    imported = import_config(tmp_path / "one.py")
    assert imported.tree["model"]["path"] == "a/b" and not imported.to_do
    assert [line for line in imported.without_counterpart if line.startswith("one.py:5: trainer.add_callback")]
    for wrong in ("2", "count()"):
        (tmp_path / "more.py").write_text(text.replace("LABELS", wrong))
        with pytest.raises(ConfigError, match=r"more.py:1: num_labels"):
            import_config(tmp_path / "more.py")


def test_weights_in_bfloat16_are_a_difference(tmp_path: Path) -> None:
    text = "model = AutoModelForCausalLM.from_pretrained('a/b', torch_dtype=torch.bfloat16)"
    lines = read(tmp_path, text, model="model").differences
    assert any(line.startswith("weights that are trained: TRL bfloat16") for line in lines)
    assert not any(line.startswith("weights that are trained") for line in read(tmp_path, "").differences)


def test_a_quantised_base_with_adapters(tmp_path: Path) -> None:
    text = """
        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained("a/b", quantization_config=bits)
        model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=4, lora_alpha=8))
    """
    model = read(tmp_path, text, model="model").tree["model"]
    assert model["path"] == "a/b" and model["quantization"] == "nf4" and model["lora"]["rank"] == 4


@pytest.mark.parametrize(("text", "given", "words"), [
    ("m = AutoModelForCausalLM.from_pretrained('a/b', revision='v2')", {"model": "m"}, "revision=v2"),
    ("b = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='fp4')\n"
     "m = AutoModelForCausalLM.from_pretrained('a/b', quantization_config=b)", {"model": "m"}, "fp4"),
    ("b = BitsAndBytesConfig(load_in_8bit=True)\nm = AutoModelForCausalLM.from_pretrained('a/b', "
     "quantization_config=b)", {"model": "m"}, "load_in_8bit"),
    ("m = AutoPeftModelForCausalLM.from_pretrained('a/b')", {"model": "m"}, "train.py:4: AutoPeft"),
    ("", {"peft_config": "LoraConfig(use_dora=True)"}, "use_dora=True"),
    ("", {"tools": "[add]"}, r"train.py:5: GRPOTrainer\(tools="),
    ("", {"optimizers": "(o, None)"}, "optimizers"),
    ("", {"reward_fns": "f"}, "no argument 'reward_fns'"),
    ("a = GRPOConfig(learning_rat=1)", {"args": "a"}, "train.py:4: .*did you mean 'learning_rate'"),
    ("a = GRPOConfig(optim='lion_8bit')", {"args": "a"}, "optim=lion_8bit"),
    ("a = GRPOConfig(min_p=0.1)", {"args": "a"}, "min_p=0.1"),
    ("a = GRPOConfig(repetition_penalty=1.1)", {"args": "a"}, "repetition_penalty"),
    ("a = GRPOConfig(generation_kwargs={'num_beams': 4})", {"args": "a"}, "num_beams"),
    ("a = GRPOConfig(lr_scheduler_kwargs={'num_cycles': 2})", {"args": "a"}, "lr_scheduler_kwargs"),
    ("t.chat_template = 'x'", {"processing_class": "t"}, "chat_template"),
    ("class Mine(GRPOTrainer):\n    pass", {}, "train.py:4: class Mine"),
])  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_name(
    text: str, given: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text, **given)


def test_every_argument_is_translated_or_has_a_reason(tmp_path: Path) -> None:
    """Documented arguments that do not affect training are listed, each with the reason."""
    idle = (
        "logging_steps=1, log_completions=True, dataloader_num_workers=4, ddp_timeout=9, tf32=True, "
        "hub_model_id='a/b', vllm_mode='server', vllm_server_port=8001, save_only_model=True, eval_delay=1, "
        "torch_compile=True, use_liger_kernel=True, remove_unused_columns=False, push_to_hub=True, "
        "disable_dropout=True, ref_model_sync_steps=2, num_completions_to_print=3, load_best_model_at_end=True"
    )
    used = (
        "optim='paged_adamw_8bit', max_grad_norm=0, vllm_gpu_memory_utilization=0.4, use_cpu=True, top_k=20, "
        "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1}, "
        "generation_kwargs={'stop': ['###']}"
    )
    imported = read(tmp_path, f"a = GRPOConfig({idle}, {used})", args="a")
    names = {line.partition("=")[0] for line in imported.without_counterpart}
    assert names == {part.partition("=")[0].strip() for part in idle.split(", ")}
    assert all(line.endswith(")") and "known to AtomRL" not in line for line in imported.without_counterpart)
    config = imported.config
    assert (config.train.optimizer, config.train.min_lr_ratio, config.model.device) == ("paged_adamw8bit", 0.1, "cpu")
    assert config.rollout.stop == ("###",) and config.rollout.gpu_memory_utilization == 0.4
    assert config.rollout.top_k == 20 and config.train.max_grad_norm > 1e20


def test_no_argument_of_transformers_is_unknown(tmp_path: Path) -> None:
    """Each field of `TrainingArguments` with its default: translated, without meaning here, or off."""
    usual = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    plain = {name: value for name, value in usual.items() if type(value) in (int, float, bool, str)}
    for trainer, config in (("GRPOTrainer", "GRPOConfig"), ("SFTTrainer", "SFTConfig"), ("DPOTrainer", "DPOConfig")):
        given = ", ".join(f"{name}={value!r}" for name, value in plain.items())
        imported = read(tmp_path, f"a = {config}({given})", trainer, args="a")
        assert not any("known to AtomRL" in line or "not used here" in line for line in imported.without_counterpart)


# ---- Rows ----


@pytest.mark.parametrize(("lines", "data"), [
    ("d = load_dataset('json', data_files='rows.jsonl', split='train')", {"train": "rows.jsonl"}),
    ("d = load_dataset('a/b', split='train')\nd = d.shuffle(seed=1).select_columns(['prompt'])",
     {"train": "a/b::train"}),
    ("d = load_dataset('a/b')['train'].select(range(64))", {"train": "a/b::train", "train_size": 64}),
    ("d = load_dataset('a/b', split='train')\nd = d.rename_column('question', 'prompt')", {"prompt_field": "question"}),
    ("d = load_dataset('a/b', split='train').rename_columns({'q': 'prompt'})", {"prompt_field": "q"}),
    ("d = concatenate_datasets([load_dataset('a/b'), load_dataset('c/d', 'x')])",
     {"train": ["a/b::train", "c/d:x:train"]}),
    ("def rows(n='a/b', part='train'):\n    r = load_dataset(n)[part]\n    return r\nd = rows(part='test')",
     {"train": "a/b::test"}),
    ("d = load_dataset('a/b', split='train').map(lambda r: {'prompt': r['q']})", {"prompt_field": "q"}),
    ("def talk(row):\n    'Make messages.'\n    row['prompt'] = [{'role': 'user', 'content': row['q']}]\n"
     "    return row\nd = load_dataset('a/b', split='train').map(talk)", {"prompt_field": "q"}),
    ("S = 'Be brief.'\nd = load_dataset('a/b', split='train').map(lambda r: {'prompt': "
     "[{'role': 'system', 'content': S}, {'role': 'user', 'content': r['q']}]})",
     {"prompt_field": "q", "system_prompt": "Be brief."}),
])  # fmt: skip
def test_rows_that_the_text_says(lines: str, data: dict[str, object], tmp_path: Path) -> None:
    imported = read(tmp_path, lines, train_dataset="d")
    assert {key: imported.tree["data"][key] for key in data} == data and not imported.to_do


@pytest.mark.parametrize(("line", "words"), [
    ("d = d.filter(lambda r: r['level'] > 3)", "train.py:5: d.filter"),
    ("d = d.map(lambda r: {'prompt': 'Q: ' + r['q']})", "train.py:5: d.map"),
    ("d = d.map(tokenize, batched=True)", "train.py:5: d.map"),
    ("d = d.shuffle(seed=1).select(range(9))", "train.py:5: .*shuffled first"),
    ("d = d.select([1, 5])", "selects rows"),
    ("d = d.train_test_split(0.1)['train']", "split at random"),
    ("d = make_rows()", "train.py:6: the rows d are made when the script runs"),
])  # fmt: skip
def test_other_changes_of_rows_are_left_to_the_user_with_their_line(line: str, words: str, tmp_path: Path) -> None:
    imported = read(tmp_path, f"d = load_dataset('a/b', split='train')\n{line}", train_dataset="d")
    [said] = imported.to_do
    assert re.search(words, said) and said in imported.report() and said in imported.yaml()


def test_rows_in_the_script_are_a_file(tmp_path: Path) -> None:
    text = "d = Dataset.from_list([{'prompt': '1+1=', 'truth': 2}, {'prompt': '2+2=', 'truth': 4}])"
    imported = read(tmp_path, text, train_dataset="d")
    assert imported.files["ours_train.jsonl"].splitlines()[1] == '{"prompt": "2+2=", "truth": 4}'
    assert imported.tree["data"]["train"] == str(tmp_path / "ours_train.jsonl")


def test_columns_of_other_kinds_of_rows(tmp_path: Path) -> None:
    text = "d = load_dataset('a/b', split='train').rename_columns({'q': 'prompt', 'good': 'chosen', 'bad': 'rejected'})"
    tree = read(tmp_path, text, "DPOTrainer", train_dataset="d").tree
    assert tree["data"]["prompt_field"] == "q"
    assert tree["preference"] == {"chosen_field": "good", "rejected_field": "bad"}
    text = "d = load_dataset('a/b', split='train').map(lambda r: {'prompt': r['q'], 'completion': r['a']})"
    tree = read(tmp_path, text, "SFTTrainer", train_dataset="d").tree
    assert tree["data"]["prompt_field"] == "q" and tree["sft"] == {"completion_field": "a"}


# ---- Rewards ----


def rewards(tmp_path: Path, text: str, functions: str) -> tuple[Imported, list[str]]:
    """An import whose files are written, and the rewards' names."""
    imported = read(tmp_path, text, reward_funcs=functions, train_dataset="load_dataset('x/y', split='train')")
    for name, source in imported.files.items():
        (tmp_path / name).write_text(source)
    return imported, [item["function"] for item in imported.tree["reward"]["functions"]]


def test_a_reward_is_copied_with_what_it_uses_and_nothing_else(tmp_path: Path) -> None:
    text = """
        import os
        import math as m
        from functools import lru_cache
        os.remove("never")
        LIMIT = 2 * 5
        OTHER = 11
        UNUSED = open("never").read()

        @lru_cache
        def helper(text):
            return m.floor(len(text) / LIMIT)

        def length(completions, **kwargs):
            'Count.'
            return [float(helper(text)) for text in completions]
    """
    imported, [name] = rewards(tmp_path, text, "length")
    source = imported.files["ours_rewards.py"]
    assert "never" not in source and "import os" not in source and "OTHER" not in source
    function = find_function(name.replace("./", f"{tmp_path}/"))
    assert function(completions=["x" * 25], prompts=[""], other=[1]) == [2.0]
    assert imported.tree["reward"]["functions"][0]["completions"] == "messages"


def test_rewards_of_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        from functools import partial

        class Worth:
            def __init__(self, worth):
                self.worth = worth

            def __call__(self, completions, **kwargs):
                return [self.worth for _ in completions]

        def times(completions, factor, **kwargs):
            return [factor * len(text) for text in completions]

        made = Worth(3.0)
    """
    given = "[Worth(0.25), made, partial(times, factor=2), lambda completions, **kwargs: [7.0 for _ in completions]]"
    _, names = rewards(tmp_path, text, given)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "bcd"}\n')
    assert main(["reward", ",".join(names), "rows.jsonl", "--out", "scored.jsonl"]) == 0
    assert json.loads(Path("scored.jsonl").read_text())["reward"] == 0.25 + 3.0 + 6.0 + 7.0


def test_rows_that_a_script_makes_into_messages_reach_its_rewards_so(tmp_path: Path) -> None:
    text = """
        def right(prompts, completions, truth, **kwargs):
            assert [message["role"] for message in prompts[0]] == ["system", "user"]
            return [float(one[0]["content"] == real) for one, real in zip(completions, truth)]

        def talk(row):
            return {"prompt": [{"role": "system", "content": "Sum."}, {"role": "user", "content": row["q"]}],
                    "truth": row["a"]}
        d = load_dataset("a/b", split="train").map(talk)
    """
    imported = read(tmp_path, text, reward_funcs="right", train_dataset="d")
    (tmp_path / "ours_rewards.py").write_text(imported.files["ours_rewards.py"])
    right = find_function(f"{tmp_path}/ours_rewards.py:right")
    assert right(prompts=["1+1=", "2+2="], completions=["2", "5"], a=["2", "4"]) == [1.0, 0.0]


@pytest.mark.parametrize(("text", "words"), [
    ("def g(completions, completion_ids, **kwargs): ...", "train.py:4: g takes completion_ids"),
    ("def g(completions): ...", r"train.py:4: g does not accept \*\*kwargs"),
    ("for k in range(3):\n    pass\ndef g(completions, **kwargs):\n    return k", "train.py:7: k, which the rewards"),
    ("def g(completions, **kwargs):\n    return score(completions)", "train.py:5: score is not defined"),
    ("from elsewhere.rewards import g", "train.py:5: the reward elsewhere.rewards.g is in a module"),
])  # fmt: skip
def test_names_missing_from_a_copy_are_reported_with_their_line(text: str, words: str, tmp_path: Path) -> None:
    imported, _ = rewards(tmp_path, text, "g")
    assert any(re.match(words, line) for line in imported.to_do)


def test_rewards_that_a_function_lists_or_makes(tmp_path: Path) -> None:
    text = """
        def g(completions, **kwargs):
            return [2.0 for _ in completions]

        def made(worth):
            def inner(completions, **kwargs):
                return [worth for _ in completions]
            return inner

        def chosen(worth=0.5):
            return [g, made(worth=3.0)]
    """
    _, names = rewards(tmp_path, text, "chosen()")
    functions = [find_function(name.replace("./", f"{tmp_path}/")) for name in names]
    assert [function(prompts=["a"], completions=["b"]) for function in functions] == [[2.0], [3.0]]


def test_a_reward_of_another_file_is_named_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('an import never runs this')")
    _, names = rewards(tmp_path, "import mine\nfrom mine import g", "[g, mine.h]")
    assert names == ["./mine.py:g", "./mine.py:h"]


def test_a_reward_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.py:5.*not defined"):
        read(tmp_path, "", reward_funcs="g")


def test_rewards_of_trl_itself(tmp_path: Path) -> None:
    text = "from trl.rewards import accuracy_reward, think_format_reward, get_repetition_penalty_reward as again"
    imported, names = rewards(tmp_path, text, "[accuracy_reward, think_format_reward, again(ngram_size=2)]")
    assert names == ["boxed", "./ours_rewards.py:think_format_reward", "repetition_penalty"]
    assert imported.tree["data"]["answer_field"] == "solution"
    function = find_function(f"{tmp_path}/ours_rewards.py:think_format_reward")
    texts = ["<think>a</think>b", "<think>a", "<think><think>a</think>", "b<think></think>"]
    assert function(prompts=texts, completions=[[{"content": text}] for text in texts]) == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="get_cosine_scaled_reward"):
        rewards(tmp_path, "from trl.rewards import get_cosine_scaled_reward as g", "g(max_len=9)")


# ---- The command line ----

PARSED = """
    @dataclass
    class Mine(ScriptArguments):
        worth: float = field(default=0.5)
    parser = TrlParser((Mine, GRPOConfig, ModelConfig))
    mine, args, model_args = parser.parse_args_and_config()
    d = load_dataset(mine.dataset_name, name=mine.dataset_config)
"""
GIVEN = {"args": "args", "model": "model_args.model_name_or_path", "train_dataset": "d[mine.dataset_train_split]"}


def test_a_config_of_the_command_line(tmp_path: Path) -> None:
    words = "--model_name_or_path q/q --dataset_name a/b --learning_rate 1e-5 --worth 2"
    imported = read(tmp_path, PARSED, command=tuple(words.split()), **GIVEN)
    tree = imported.tree
    assert (tree["model"]["path"], tree["data"]["train"]) == ("q/q", "a/b::train")
    assert tree["train"]["learning_rate"] == 1e-5 and [line.partition("=")[0] for line in imported.to_do] == ["--worth"]
    script = tmp_path / "run.sh"
    script.write_text(f"accelerate launch --num_processes 4 train.py {words}\n")
    whole = import_config(script, out=tmp_path / "ours.yaml")
    assert whole.tree["train"]["rows_per_update"] == 32 and whole.tree["model"] == tree["model"] and whole.gpus == 4
    with pytest.raises(ConfigError, match=r"model_args.model_name_or_path"):
        read(tmp_path, PARSED, **GIVEN)


def test_arguments_of_argparse_have_defaults(tmp_path: Path) -> None:
    text = """
        parser = argparse.ArgumentParser()
        parser.add_argument("--learning-rate", type=float, default=2e-6)
        parser.add_argument("--name", default="q/q")
        parser.add_argument("--steps", type=int)
        args = parser.parse_args()
        config = GRPOConfig(learning_rate=args.learning_rate{})
    """
    given = {"args": "config", "model": "args.name"}
    imported = read(tmp_path, text.format(""), **given)
    assert imported.tree["train"]["learning_rate"] == 2e-6
    assert any(
        "args.learning_rate is from the command line: its default 2e-06" in line for line in imported.approximated
    )
    imported = read(tmp_path, text.format(""), command=("--learning-rate", "3e-6", "--other", "1"), **given)
    assert imported.tree["train"]["learning_rate"] == 3e-6 and any("--other=1" in line for line in imported.to_do)
    with pytest.raises(ConfigError, match=r"args\.steps"):
        read(tmp_path, text.format(", max_steps=args.steps"), **given)


def test_several_trainers_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("SFTTrainer('a/b')\nSFTTrainer('c/d')")
    imported = import_config(tmp_path / "a.py")
    assert imported.tree["model"]["path"] == "a/b" and any(
        "a.py:1" in line and "line 2" in line for line in imported.to_do
    )


@pytest.mark.parametrize(("text", "line", "named"), [
    ("GRPOConfig(\n    learning_rate='fast')", 2, "learning_rate"),
    ("GRPOConfig(\n    learning_rate=-1e-6)", 2, "learning_rate"),  # which our config refuses
    ("a = GRPOConfig('o')\n\na.temperature = True", 3, "temperature"),
    ("GRPOConfig('o',\n  loss_type='grop')", 2, "loss_type"),
    ("GRPOConfig('o',\n  num_generations=0)", 2, "num_generations"),
    ("GRPOConfig('o',\n  per_device_train_batch_size=6,\n  num_generations=4)", 2, "per_device_train_batch_size"),
    ("GRPOConfig('o',\n  optim='sgd')", 2, "optim"),
    ("GRPOConfig('o',\n  top_p=1.5)", 2, "top_p"),
    ("GRPOTrainer('m', peft_config=LoraConfig(\n  r=0))", 2, "lora_r"),
])  # fmt: skip
def test_a_value_that_is_wrong_is_named_with_file_and_line(text: str, line: int, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"train\.py:{line}.*{named}"):
        imported(tmp_path, text)
