"""Public TRL scripts through `atomrl run`: two steps each on tiny local models and data.

    python tools/trl_scripts.py CHECKOUTS [--only TEXT] [--out docs/development/trl_scripts.md]

`CHECKOUTS` holds a checkout of each repository that `tools/trl_scripts.txt` names. Each file of that list runs in a
process of its own, unchanged: `atomrl run FILE ARGUMENTS`. This script replaces only what a machine without a GPU and
without the hub lacks: models, data sets, uploads, and calls that ask for a GPU. A run is cut to two steps of a few
rows. The result is a table with the reason for each file that does not run to its end.
"""

import argparse
import importlib
import importlib.machinery
import os
import re
import shlex
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_suffix(".txt")
LIMIT_S = 900
PACKAGES = f"{sysconfig.get_path('purelib')}/"
"""Folder of the installed packages, which is left out of reasons."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
LIBRARIES = "torch", "transformers", "datasets", "peft", "atomrl.trl", "atomrl.cli.main"
"""Imported once; each script then runs in a copy of the process."""

# --------------------------------------------------------------------------------------------------------------------
# Stand-ins, in the process of a script

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

VISION_TEMPLATE = TEMPLATE.replace(
    "{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}",
    "{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.content is string %}{{- m.content }}{%- else %}"
    "{%- for part in m.content or [] %}{%- if part.type == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}",
)


def make_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Save a random Qwen2 of two layers whose tokens are bytes, with a ChatML template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({token: n for n, token in enumerate(special + alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_vision_model(model: Path, folder: Path) -> Path:
    """Save a random Qwen2.5-VL with the same tokenizer, two layers and a small tower, and its processor."""
    from transformers import (
        AutoTokenizer,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    tokenizer.add_special_tokens({"additional_special_tokens": [*names.values()]})
    tokenizer.chat_template = VISION_TEMPLATE
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384, "eos_token_id": 2,
        "pad_token_id": 0, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56,
    }  # fmt: skip
    tokens = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    ).save_pretrained(folder)
    size = {"shortest_edge": 28**2, "longest_edge": 56**2}
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(patch_size=14, size=size), tokenizer, Qwen2VLVideoProcessor(patch_size=14, size=size),
        chat_template=VISION_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_other_vision_model(model: Path, folder: Path) -> Path:
    """Save a random Gemma 3 with a vision tower, of which AtomRL trains the language model alone, and its processor."""
    from transformers import (
        AutoTokenizer,
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessor,
        Gemma3Processor,
    )

    tokenizer = AutoTokenizer.from_pretrained(
        model, extra_special_tokens={"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    )
    tokenizer.chat_template = VISION_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<boi>")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {**shape, "vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 16384, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}  # fmt: skip
    vision = {**shape, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    settings = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id, eoi_token_index=tokenizer.eoi_token_id, eos_token_id=2,
    )  # fmt: skip
    Gemma3ForConditionalGeneration(settings).save_pretrained(folder)
    Gemma3Processor(
        Gemma3ImageProcessor(size={"height": 28, "width": 28}), tokenizer, chat_template=tokenizer.chat_template,
        image_seq_length=4,
    ).save_pretrained(folder)  # fmt: skip
    return folder


WITH_TOWER = re.compile(
    r"vl\b|vl-|vision|qwen-?3[._]5|gemma-?3-(4|12|27)b|gemma-?4|ministral-?3|llava|idefics|internvl|smolvlm", re.I
)
"""Part of the name of a model with a vision tower."""


def stand_in_for(name: str, work: Path, model: str) -> Path:
    """Return the tiny model that stands for a name on the hub."""
    if not WITH_TOWER.search(name):
        return work / model
    return work / ("vision" if "qwen" in name.lower() else "other_vision")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CODE = "```python\nprint(int(input()) + 1)\n```"
PAIR = {"chosen": [user("hi"), assistant("Hello.")], "rejected": [user("hi"), assistant("no")]}
MATH = {"problem": "What is 2+3?", "solution": "It is $\\boxed{5}$.", "answer": "5"}
CHAT = {"messages": [user("What is 2+3?"), assistant("5")]}
PICTURE = object()
"""In a row: a picture."""
CASES = [{"input": "1\n", "output": "2\n"}]
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("rlaif-v", {"images": [PICTURE], "prompt": [user("hi")], "chosen": PAIR["chosen"][1:],
                 "rejected": PAIR["rejected"][1:]}),
    ("mmiu|llava", {"images": [PICTURE], "input_image_path": ["absent.png"], "context": "Be brief.", "question": "2?",
                    "output": "2", **CHAT}),
    ("mathvista", {"image": "images/1.jpg", "decoded_image": PICTURE, "question": "2?", "answer": "5",
                   "answer_type": "float", "question_type": "free_form", "query": "2?"}),
    ("multimodal|geometry3k", {"image": PICTURE, "problem": "2?", "solution": "$5$"}),
    ("dmath-candidates", {"system_prompt": "Be exact.", "prompt": "What is 2+3?", "chosen": "5", "rejected": "6"}),
    ("dolphin", {"instruction": "Add.", "input": "2+3", "accepted": "5", "rejected": "6"}),
    ("simpletoolcalling", {"user_content": "Weather in Rome?", "tool_name": "get_weather",
                           "tool_arguments": "{\"location\": \"Rome\"}"}),
    ("gsm8k", {"question": "Tom has 2 and gets 3. How many?", "answer": "2+3=5\n#### 5"}),
    ("numina", MATH | CHAT),
    ("openr1-math|dapo-math|openmath|bigmath|math", MATH | CHAT | {
        "prompt": "What is 2+3?", "expected_answer": "5", "generated_solution": "<think>2+3</think>5",
        "problem_type": "x", "problem_source": "x", "generation_model": "x", "pass_rate_72b_tir": "0.5",
        "inference_mode": "cot"}),
    ("countdown", {"target": 5, "nums": [2, 3]}),
    ("codeforces-cots", CHAT | {"prompt": "Add one.", "generation": CODE, "id": "1"}),
    ("codeforces", {"prompt": "Add one.", "description": "Add one.", "language": "python", "official_tests": CASES,
                    "private_test_cases": CASES, "id": "1/A", "time_limit": 2.0, "memory_limit": 256.0,
                    "generated_checker": None, "input_mode": "stdio", "test_cases": CASES}),
    ("ioi", {"problem": "Add one.", "id": "a", "subtask": "1", "year": 2024, "day": "1", "name": "a",
             "starting_code": "", "test_names": ["1"], "prompt": "Add one."}),
    ("tldr-preference", {"prompt": "SUBREDDIT: r/x TL;DR:", "chosen": " a short one", "rejected": " b"}),
    ("tldr", {"prompt": "SUBREDDIT: r/x POST: I have a cat. TL;DR:", "completion": " I have a cat."}),
    ("ultrafeedback-prompt", {"prompt": [user("hi")]}),
    ("triple-preference", {"prompt": "hi", "chosen": [user("hi"), assistant("a")],
                           "rejected": [user("hi"), assistant("b")], "reference": [user("hi"), assistant("c")]}),
    ("kto", {"prompt": [user("hi")], "completion": [assistant("Hello.")], "label": True}),
    ("descriptiveness", {"prompt": "hi", "chosen": [user("hi"), assistant("a")],
                         "rejected": [user("hi"), assistant("b")]}),
    ("dpo|pairs|binarized|preference|hh-rlhf", PAIR | {
        "prompt": "hi", "score_chosen": 8.0, "score_rejected": 3.0, "system_prompt": "Be kind.",
        "messages": PAIR["chosen"]}),
    ("chatbot_arena_completions", {"prompt": [user("hi")], "completion": [assistant("Hello.")], **CHAT}),
    ("smoltalk2", CHAT | PAIR | {"prompt": "hi", "chat_template_kwargs": {"enable_thinking": False}}),
    ("imdb", {"text": "A good film.", "label": 1}),
    ("multilingual-thinking", CHAT | {"developer": "x", "user": "x", "final": "x", "analysis": "x"}),
    ("cai-conversation|grok-conversation", CHAT | PAIR | {"prompt": "hi"}),
    ("biogrid_qa", {"question": "Is A B?", "answer": "yes"}),
    ("biogrid", {"Official_Symbol_Interactor_A": "A", "Official_Symbol_Interactor_B": "B"}),
    ("rstar", {"question": "Add one.", "response": CODE, "seed_question": "x", "starter_code": ""}),
]  # fmt: skip
"""Part of a data set's name -> one row with its columns. The first that matches counts; any other is a chat."""


def load_dataset(path: str, name: Any = None, *_: Any, split: Any = None, data_files: Any = None, **__: Any) -> Any:
    """Return 192 rows with the columns of the data set `path`, with the splits that are asked for."""
    from datasets import Dataset, DatasetDict

    named = f"{path} {data_files}".lower()
    row = next((row for part, row in ROWS if re.search(part, named)), CHAT | {"prompt": "hi", "text": "A text."})

    rows = Dataset.from_list([json_copy(row, number) for number in range(192)])
    if isinstance(split, list):
        return [rows for _ in split]
    if split is not None:
        return rows
    names = ("train", "test", "train_sft", "test_sft", "train_prefs", "test_prefs", "validation")
    return DatasetDict(dict.fromkeys(names, rows))


def json_copy(row: dict[str, Any], number: int) -> dict[str, Any]:
    from PIL import Image

    def copied(value: Any) -> Any:
        if value is PICTURE:
            return Image.new("RGB", (56, 56), (number, 90, 30))
        if isinstance(value, list):
            return [copied(each) for each in value]
        return value

    return {key: f"{value} " if isinstance(value, str) and number else copied(value) for key, value in row.items()}


def no_hub(work: Path, model: str, revisions: set[str], names: set[str], cache: Path) -> None:
    """Put a tiny model under every name that a script mentions into a cache of the hub."""
    for name in names:
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "snapshots").mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        for revision in revisions:
            (folder / "refs" / revision).write_text("0" * 40)
        if not (folder / "snapshots" / ("0" * 40)).exists():
            (folder / "snapshots" / ("0" * 40)).symlink_to(stand_in_for(name, work, model))


def named_at_run_time(work: Path, model: str, cache: Path) -> None:
    """Put the tiny model into the cache for names that a script puts together, when it loads them."""
    from transformers.utils import hub

    found = hub.cached_files

    def cached_files(path_or_repo_id: Any, *given: Any, **named: Any) -> Any:
        name = str(path_or_repo_id)
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not Path(name).exists():
            no_hub(work, model, {"main", named.get("revision") or "main"}, {name}, cache)
        return found(path_or_repo_id, *given, **named)

    hub.cached_files = cached_files


def stand_in() -> None:
    """Replace data sets, uploads and questions about the GPU."""
    import types

    import datasets
    import huggingface_hub
    import torch

    datasets.load_dataset = load_dataset
    split = datasets.Dataset.train_test_split
    datasets.Dataset.train_test_split = lambda self, *_, **__: split(self, test_size=0.25)  # of few rows
    datasets.load_from_disk = load_dataset
    for name in ("login", "notebook_login", "create_repo", "upload_folder", "whoami", "repo_exists", "list_repo_refs"):
        setattr(huggingface_hub, name, lambda *_, **__: {"name": "me"})
    for name in ("create_repo", "upload_folder", "upload_file", "whoami", "create_commit", "repo_exists"):
        setattr(huggingface_hub.HfApi, name, lambda *_, **__: types.SimpleNamespace(name="me", repo_id="me/model"))
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.is_bf16_supported = lambda *_, **__: False
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        name="none", total_memory=2**34, major=8, minor=0
    )
    torch.cuda.max_memory_reserved = torch.cuda.memory_allocated = lambda *_: 0
    moved = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *a, **k: self if a and str(a[0]).startswith("cuda") else moved(self, *a, **k)
    import transformers

    owners: tuple[Any, ...] = (torch.Tensor, transformers.BatchEncoding, transformers.BatchFeature)
    for owner in owners:
        kept = owner.to
        owner.to = lambda self, *a, _kept=kept, **k: (
            self if a and str(a[0]).startswith("cuda") else _kept(self, *a, **k)
        )

    for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
        setattr(transformers.training_args, name, lambda: True)
    on_gpu = ("attn_implementation", "quantization_config", "device_map", "load_in_4bit", "load_in_8bit",
              "use_flash_attention_2")  # fmt: skip
    kinds = ("CausalLM", "SequenceClassification", "Seq2SeqLM", "ImageTextToText")
    for name in ("AutoModel", *(f"AutoModelFor{kind}" for kind in kinds)):
        auto: Any = getattr(transformers, name)
        auto.from_pretrained = classmethod(
            lambda cls, *a, _loaded=auto.from_pretrained.__func__, **k: _loaded(
                cls, *a, **{key: value for key, value in k.items() if key not in on_gpu}
            )
        )
    chosen = datasets.Dataset.select
    datasets.Dataset.select = lambda self, indices, *a, **k: chosen(
        self, [n for n in indices if 0 <= n < len(self)] or range(min(16, len(self))), *a, **k
    )
    colab, vllm = types.ModuleType("google.colab"), types.ModuleType("vllm")
    vllm.LLM = type("LLM", (), {})  # type: ignore[attr-defined]
    colab.drive = types.SimpleNamespace(mount=lambda *_, **__: None)  # type: ignore[attr-defined]
    colab.userdata = types.SimpleNamespace(get=lambda *_: "x")  # type: ignore[attr-defined]
    vllm.SamplingParams = type("SamplingParams", (), {"__init__": lambda self, **k: self.__dict__.update(k)})  # type: ignore[attr-defined]
    for module in (colab, vllm):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    sys.modules |= {"google.colab": colab, "vllm": vllm}
    import builtins
    import getpass

    builtins.input = getpass.getpass = lambda *_: "x"  # type: ignore[assignment]


SMALL = {
    "max_length": 4096,  # of bytes
    "max_steps": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 1,
    "num_generations": 4, "generation_batch_size": None, "steps_per_generation": None, "max_completion_length": 8,
    "num_generations_eval": 4, "use_cpu": True, "bf16": False, "fp16": False, "response_length": 8, "max_new_tokens": 8,
    "num_mini_batches": 1, "num_ppo_epochs": 1, "total_episodes": 8, "local_rollout_forward_batch_size": 4,
    "use_vllm": False, "dataloader_num_workers": 0, "torch_compile": False,
}  # fmt: skip
CPU_OPTIMIZERS = {"paged_adamw_8bit": "adamw_torch", "adamw_8bit": "adamw_torch", "paged_adamw_32bit": "adamw_torch"}


def cut_short() -> None:
    """Cut every training to two steps of four rows, whatever a script's arguments say."""
    import atomrl.trl as trl
    from atomrl.trl.trainer import Trainer

    def smaller(original: Any) -> Any:
        def init(self: Any, *given: Any, **named: Any) -> None:
            for args in [*given, *named.values()]:
                if hasattr(args, "output_dir") and hasattr(args, "learning_rate"):
                    for name, value in SMALL.items():
                        if hasattr(args, name):
                            setattr(args, name, value)
                    if getattr(args, "kind", "") in ("grpo", "rloo"):
                        args.max_prompt_length = SMALL["max_length"]
                    if str(getattr(args.optim, "value", args.optim)) in CPU_OPTIMIZERS:
                        args.optim = "adamw_torch"
            original(self, *given, **named)

        return init

    for name in ["Trainer", *dir(trl)]:
        trainer = Trainer if name == "Trainer" else getattr(trl, name, None)
        if name.endswith("Trainer") and isinstance(trainer, type) and "__init__" in vars(trainer):
            trainer.__init__ = smaller(trainer.__init__)  # type: ignore[misc]


def child(work: Path, script: Path, arguments: list[str]) -> None:
    """Run one script, in this process."""
    import huggingface_hub

    from atomrl.trl.running import notebook_code

    if script.suffix == ".ipynb":
        texts = [notebook_code(script)[0], *arguments]
    else:
        texts = [script.read_text(encoding="utf-8", errors="replace"), *arguments]
    texts += [Path(each).read_text(encoding="utf-8") for each in arguments if each.endswith((".yaml", ".yml"))]
    names = set(re.findall(r"[\w.-]+/[\w.-]+", "\n".join(texts)))
    names |= set(re.findall(r"(?:model_name_or_path|model_path|model_id)\W+([\w./-]+)", "\n".join(texts)))
    names = {name for name in names if len(name) < 100}
    names.add("EleutherAI/pythia-160m")  # PPOConfig's default
    revisions = {*re.findall(r"revision: ([\w.-]+)", "\n".join(texts)), "main"}
    # a base model, to which the script gives a template
    model = "base" if "setup_chat_format(" in texts[0] else "model"
    cache = work / f"hub-{model}"
    os.environ["HF_HUB_CACHE"] = huggingface_hub.constants.HF_HUB_CACHE = str(cache)
    no_hub(work, model, revisions, {name for name in names if not Path(name).exists()}, cache)
    named_at_run_time(work, model, cache)
    sys.path[:0] = [
        str(each) for each in (script.parents[2] / "src", script.parents[1] / "src", script.parent) if each.is_dir()
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    stand_in()
    cut_short()
    from atomrl.cli.main import main

    sys.exit(main(["run", str(script), *arguments]))


# --------------------------------------------------------------------------------------------------------------------
# The list, one process for each file, the table


def recipe_script(repository: Path, path: str) -> tuple[str, list[str]] | None:
    """Return the script that a YAML recipe belongs to, with its arguments."""
    kind = next((kind for kind in ("sft", "dpo", "grpo", "orpo") if f"/{kind}/" in path or f"/{kind}-" in path), None)
    name = repository.name
    if name == "open-r1" and kind:
        return f"src/open_r1/{kind}.py", ["--config", path]
    if name == "alignment-handbook" and kind:
        return f"scripts/{kind}.py", ["--config", path]
    if name == "philschmid":
        script = {"grpo": "run_r1_grpo.py", "dpo": "dpo/run_dpo.py"}.get(kind or "", "run_sft.py")
        return f"training/scripts/{script}", ["--config", path]
    return ("trl/scripts/sft.py", ["--config", path]) if name == "trl" else None


def documented_arguments(text: str, name: str) -> list[str]:
    """Return the flags of the first command in a script's docstring that names the script."""
    joined = re.sub(r"\\\s*\n", " ", text)
    found = re.search(
        rf"^\W*(?:[A-Z_]+=\S+ )*(?:python|accelerate|uv|trl)\b[^\n]*?{re.escape(name)}(.*)$", joined, re.MULTILINE
    )
    return shlex.split(found.group(1).split("```")[0]) if found else []


def forked(run: Callable[[], None], place: Path, log: Path) -> int | None:
    """Run a function in a copy of this process, which has the libraries loaded, in the folder `place`.

    Returns:
        Its exit code; None if it was ended after `LIMIT_S`.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(place)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(stream, number)
        code = 1
        try:
            run()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.2)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def run_file(checkouts: Path, entry: str, given: list[str], work: Path) -> tuple[str, str]:
    """Run one file of the list. Returns (result, reason)."""
    repository, _, path = entry.partition("/")
    folder = checkouts / repository
    script, arguments = path, given
    if path.endswith((".yaml", ".yml")):
        recipe = recipe_script(folder, path)
        if recipe is None:
            return "no script", "the recipe belongs to no training script"
        script, arguments = recipe
    elif path.endswith(".py") and not given:
        arguments = documented_arguments((folder / path).read_text(encoding="utf-8"), Path(path).name)
    if not (folder / script).exists():
        return "absent", script
    arguments = [
        str((folder / each).resolve()) if each.endswith(".yaml") and (folder / each).exists() else each
        for each in arguments
    ]
    (work / "logs").mkdir(exist_ok=True)
    log = work / "logs" / re.sub(r"\W+", "_", entry)
    code = forked(lambda: child(work, (folder / script).resolve(), arguments), Path(tempfile.mkdtemp(dir=work)), log)
    if code is None:
        return "too long", f"over {LIMIT_S} s"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    steps = max([int(step) for step in re.findall(r"^step (\d+)/", "\n".join(lines), re.MULTILINE)], default=0)
    if code == 0:
        return ("ran", "") if steps else ("no training", lines[-1][:160] if lines else "")
    errors = [
        line for line in lines if re.match(r"(atomrl|error|[\w.]*(Error|Exception|Interrupt|Exit))\b.*:", line.strip())
    ]
    reason = (errors or lines or [""])[-1].strip()[:220]
    return ("after training" if steps >= 2 else "refused" if reason.startswith("error:") else "failed"), reason


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", default=[""], nargs="+", help="files whose path contains one of these")
    parser.add_argument("--out", type=Path, help="write the table here")
    parser.add_argument("--list", type=Path, default=LIST, help="the list of files")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "trl_scripts")
    given = parser.parse_args()
    given.work = given.work.resolve()
    given.checkouts = given.checkouts.resolve()
    given.work.mkdir(exist_ok=True)
    os.environ |= OFFLINE | {"HF_HUB_CACHE": str(given.work / "hub")}
    for name in LIBRARIES:
        importlib.import_module(name)
    if not (given.work / "base" / "config.json").exists():
        make_model(given.work / "base", template=None)
        make_vision_model(make_model(given.work / "model"), given.work / "vision")
        make_other_vision_model(given.work / "model", given.work / "other_vision")
    entries = [line.split("#")[0].strip() for line in given.list.read_text(encoding="utf-8").splitlines()]
    results: list[tuple[str, str, str]] = []
    for line in filter(None, entries):
        entry, *arguments = line.split(" ") if " --" in line else [line]
        if any(part in entry for part in given.only):
            result, reason = run_file(given.checkouts, entry, arguments, given.work)
            results.append((entry, result, reason.replace(f"{given.checkouts}/", "").replace(PACKAGES, "")))
            print(row(results[-1]), flush=True)
    print(Counter(result for _, result, _ in results))
    if given.out:
        given.out.write_text(page(results), encoding="utf-8")


def row(cells: Sequence[object]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def page(results: Sequence[tuple[str, str, str]]) -> str:
    """Return the page of the results: a count by repository, and each file with its reason."""
    counts = Counter((entry.partition("/")[0], result) for entry, result, _ in results)
    kinds = ("ran", "refused", "failed")
    counted = []
    for repository in dict.fromkeys(entry.partition("/")[0] for entry, _, _ in results):
        of_kind = [counts[repository, kind] for kind in kinds[:2]]
        files = sum(count for (name, _), count in counts.items() if name == repository)
        counted.append([repository, files, *of_kind, files - sum(of_kind)])
    counted.append(["all", *(sum(column) for column in zip(*(line[1:] for line in counted), strict=True))])
    files = [row([f"`{entry}`", result, reason]) for entry, result, reason in results]
    return "\n".join([
        "# Public scripts through `atomrl run`", "",
        "Written by `tools/trl_scripts.py`. Each file runs unchanged on a CPU; its models are tiny ones with random",
        "weights, its data sets made-up rows with the same columns, and a training is cut to two steps. *ran*: these",
        "and on to its end; *refused*: AtomRL's error before both steps were done; *failed*: its own error, mostly a",
        "package, a file, a service or a value of a row that is not there. The first table counts all other results",
        "(*no training*, *no script*) as *failed*.", "",
        row(["repository", "files", *kinds]), "|---|---|---|---|---|", *map(row, counted), "",
        row(["file", "result", "reason"]), "|---|---|---|", *files, "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
