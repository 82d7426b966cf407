"""`atomrl run`: scripts and notebooks of TRL and unsloth, unchanged, on a tiny model."""

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
import torch
import yaml
from safetensors.torch import load_file

from atomrl.cli.main import main
from atomrl.redirect import VARIABLE, Finder
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", model)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield tmp_path
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("trl", "unsloth", "my_rewards")]:
        del sys.modules[name]


def write(place, text, name="train.py"):
    (place / name).write_text(textwrap.dedent(text))
    return name


GRPO = """
    import os
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **columns):
        return [float(len(text)) for text in completions]

    SMALL = dict(max_completion_length=4, num_generations=2, per_device_train_batch_size=2, max_steps=1, use_cpu=True)
    def trainer(out, **arguments):
        return GRPOTrainer(os.environ["MODEL"], reward_funcs=reward, args=GRPOConfig(out, **SMALL, **arguments),
                           train_dataset=[{"prompt": f"{n}+1="} for n in range(4)])
"""

COMMAND_LINE = """
    from dataclasses import dataclass
    import os
    from transformers import AutoTokenizer, TrainerCallback
    from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config
    from trl.trainer.sft_trainer import SFTTrainer as Same

    @dataclass
    class Arguments(SFTConfig):
        chat_template: str | None = None

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_training_stop = state.global_step == 2
            return control

    if __name__ == "__main__":
        args, of_model = TrlParser((Arguments, ModelConfig)).parse_args_and_config()
        assert of_model.dtype == "bfloat16"
        assert args.chat_template == "mine" and args.max_length == 32 and Same is SFTTrainer
        rows = [{"text": f"one and {n}"} for n in range(8)]
        trainer = SFTTrainer(of_model.model_name_or_path, args=args, train_dataset=rows, eval_dataset=rows[:2],
                             peft_config=get_peft_config(of_model), callbacks=[Ends()],
                             processing_class=AutoTokenizer.from_pretrained(of_model.model_name_or_path))
        result = trainer.train(resume_from_checkpoint=None)
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        trainer.save_model("saved")
        trainer.create_model_card(tags="x")
        if trainer.accelerator.is_main_process:
            print(result.global_step, result.training_loss > 0, trainer.evaluate()["eval_loss"] > 0)
"""


def test_a_script_with_a_command_line_runs_as_it_is(place, model, capfd):
    script = write(place, COMMAND_LINE)
    (place / "a.yaml").write_text(
        f"model_name_or_path: {model}\ntorch_dtype: bfloat16\nchat_template: mine\nuse_peft: true\n"
    )
    words = [
        "--config",
        "a.yaml",
        "--output_dir",
        "out",
        "--max_seq_length",
        "32",
        "--max_steps",
        "9",
        "--use_cpu",
        "true",
    ]
    assert main(["run", script, *words, "--lora_r=2", "--lora_target_modules", "q_proj", "v_proj"]) == 0
    out, err = capfd.readouterr()
    assert "2 True True" in out and "the defaults are those of TRL" in err
    assert json.loads((place / "out/all_results.json").read_text())["train_loss"] > 0
    assert (place / "saved/adapter_model.safetensors").is_file() and (place / "out/trainer_state.json").is_file()
    config = yaml.safe_load((place / "out/config.yaml").read_text())
    assert config["data"]["chat_template"] == "messages_only" and config["model"]["lora"]["rank"] == 2


def test_a_dry_run_and_the_config_stop_where_the_script_would_train(place, capfd):
    script = write(place, GRPO + '    trainer("out", beta=0.04).train()\n    raise SystemExit("REACHED")\n')
    assert main(["run", "--dry-run", "--config-out", "x.yaml", script]) == 0
    out, err = capfd.readouterr()
    assert "the defaults are those of TRL" in out and "REACHED" not in err
    assert yaml.safe_load((place / "x.yaml").read_text())["algorithm"]["kl"]["coefficient"] == 0.04
    assert not (place / "out/metrics.jsonl").exists()


BAD = {
    "another trainer": ("from trl import BCOTrainer\nBCOTrainer()", 2, r"train.py:1: .*BCOTrainer .*loss_type='bco'"),
    "a part of a trainer": ("from trl import GKDConfig\nGKDConfig('o')", 2, "train.py:2: .*lmbda=0.5 has no count"),
    "a function": ("from trl.trainer.utils import pad_it\npad_it()", 2, "train.py:1: AtomRL has no pad_it of T"),
    "a function of unsloth": ("import unsloth\nunsloth.patch_it()", 2, "train.py:2: AtomRL has no patch_it of unsloth"),
    "an experimental one": ("from trl.experimental.nash_md import NashMDTrainer as N; N()", 2, "no NashMDTrainer"),
    "no training": ("from trl.import_utils import is_peft_available, is_nowhere_available as no\n"
                    "assert is_peft_available() and not no()", 0, ""),
    "an exit": ("import trl, sys; sys.exit(3)", 3, ""),
    "an exit with words": ("import trl, sys; sys.exit('no flags')", 1, "no flags"),
    "its own error": ("import trl\n1 / 0", 1, "ZeroDivisionError"),
    "an exit with an object": ("import trl, sys; sys.exit(['no', 'flags'])", 1, "no', 'flags"),
    "standard input": ("import trl\ninput()", 1, "EOFError|stdin"),
    "internals": ("from trl import SFTTrainer\nclass X(SFTTrainer):\n def compute_loss(self): 0", 2,
                  "train.py:2: class X overrides compute_loss"),
    "unknown argument": ("from trl import SFTConfig\nSFTConfig('o', lerning_rate=1)", 2, "train.py:2: .*learning_rate"),
    "unsloth's collator": ("from unsloth.trainer import UnslothVisionDataCollator as C; C()", 2,
                           "changes the size of pictures"),
    "a loop of steps": ("from trl import AutoModelForCausalLMWithValueHead as M\nM.from_pretrained('x')", 2,
                        r"train.py:1: AtomRL has no .* for a loop of ppo_trainer.step .*GRPOTrainer"),
    "an import that is not used": ("from trl import NashMDTrainer, AutoModelForCausalLMWithValueHead", 0, ""),
    "inside a function": ("def f():\n from trl import ORPOConfig, PRMTrainer\n PRMTrainer()\nf()", 2,
                          "train.py:2: AtomRL has no PRM"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_a_script_may_do_ends_as_its_author_expects(what, place, capfd):
    text, code, said = BAD[what]
    assert main(["run", write(place, text)]) == code
    assert re.search(said, capfd.readouterr().err)


def test_two_trainers_a_fork_and_a_second_training(place, capfd):
    script = write(
        place,
        GRPO
        + """
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    first = trainer("one", learning_rate=0.01)
    first.train()
    trainer("two").train()
    first.train()
    """,
    )
    assert main(["run", script]) == 0
    assert (place / "two/summary.json").is_file()
    assert "one has an earlier run of this script; this one is in one-2" in capfd.readouterr().err
    trained, again = (load_file(place / path / "model.safetensors") for path in ("one/model", "one-2/inputs/model"))
    assert all(torch.equal(trained[name], again[name]) for name in trained)  # it goes on from the trained weights

    write(place, GRPO + '    trainer("one").train()')  # a script that is started again
    assert main(["run", script]) == 2
    assert re.search(r"train.py:\d+: the run one already exists", capfd.readouterr().err)


def test_a_reward_in_a_module_that_imports_trl_works_in_its_worker(place):
    write(
        place,
        "from trl import GRPOConfig\ndef fixed(completions, **_): return [1.0 * len(c) for c in completions]",
        "my_rewards.py",
    )
    script = write(place, GRPO + "    from my_rewards import fixed as reward\n    trainer('out').train()\n")
    done = subprocess.run(
        [sys.executable, "-m", "atomrl", "run", script], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "my_rewards" in (place / "out/config.yaml").read_text()


def test_processes_of_a_script_have_its_trl(place, capfd):
    script = write(
        place,
        """
        import multiprocessing, os, subprocess, sys, trl
        from importlib.metadata import version

        def ask():
            import trl
            os._exit(trl.__version__ != version("trl"))

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=ask)
            process.start()
            process.join()
            print(process.exitcode, subprocess.call([sys.executable, "-c", "import trl; print(trl.__spec__.name)"]))
        """,
    )
    assert main(["run", script]) == 0
    assert capfd.readouterr().out == "trl\n0 0\n"


OLDER = """
    import os
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
    from trl import SFTTrainer
    tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])
    model = AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], use_auth_token=None, load_in_8bit=False)
    rows = [{"line": f"{n}+1={n + 1}"} for n in range(8)]
    args = TrainingArguments("out", evaluation_strategy="no", warmup_ratio=0.5, group_by_length=True, use_cpu=True,
                             per_device_train_batch_size=4, num_train_epochs=2, **EXTRA)
    SFTTrainer(model, train_dataset=rows, dataset_text_field="line", max_seq_length=32, tokenizer=tokenizer,
               args=args).train()
"""


def test_a_script_for_older_versions_of_transformers_and_trl(place):
    assert main(["run", write(place, OLDER.replace("**EXTRA", ""))]) == 0
    config = yaml.safe_load((place / "out/config.yaml").read_text())
    assert config["train"]["warmup_ratio"] == 0.5 and config["train"]["max_row_tokens"] == 32


def test_warm_up_steps_are_optimizer_steps(place):
    script = write(place, OLDER.replace("warmup_ratio=0.5", "warmup_steps=1").replace("**EXTRA", ""))
    assert main(["run", script]) == 0
    config = yaml.safe_load((place / "out/config.yaml").read_text())
    assert config["train"]["warmup_updates"] == 1


def test_an_unknown_argument_of_transformers_is_its_own_error(place, capfd):
    assert main(["run", write(place, OLDER.replace("**EXTRA", "evaluation_strat='no'"))]) == 1
    assert "unexpected keyword argument 'evaluation_strat'" in capfd.readouterr().err


def test_a_flag_of_the_script_that_is_also_a_config_s(place, capfd):
    script = write(
        place,
        """
        from dataclasses import dataclass
        from trl import SFTConfig, TrlParser
        @dataclass
        class Own:
            project: str
            hub_token: str = "none"
        args, own = TrlParser((SFTConfig, Own)).parse_args_and_config()
        print(own.project, own.hub_token, args.output_dir)
        """,
    )
    assert main(["run", script, "--project", "mine", "--hub_token", "x", "--output_dir", "out"]) == 0
    assert "mine x out" in capfd.readouterr().out


def test_a_notebook_runs_without_its_shell_lines(place, capfd):
    cells = [
        ["!pip install trl \\\n", "  unsloth\n", "%env X=1\n", "import trl\n"],
        "%%bash\nls\n",
        "%%capture\n!ls\nname = 'ran'",
        "if trl:\n  !ls\nprint(name)",
        'print("""1\n!2\n%3""", "%s"\n% (4))',
    ]
    cells = [{"cell_type": "code", "source": cell} for cell in cells] + [{"cell_type": "markdown", "source": "!no"}]
    (place / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert main(["run", "a.ipynb"]) == 0
    out, err = capfd.readouterr()
    assert out == "ran\n1\n!2\n%3 4\n" and "left out: !pip install trl" in err and "%%bash (its cell)" in err


def test_a_notebook_that_was_exported_as_a_script(place, capfd):
    script = write(
        place,
        """
        get_ipython().system('pip install trl')
        get_ipython().run_line_magic('matplotlib', 'inline')
        get_ipython().run_cell_magic('capture', '', 'import trl\\n!ls\\ndef name(): return __name__, later')
        get_ipython().run_cell_magic('bash', '', 'exit 1')
        get_ipython().run_cell_magic('timeit', '-n 1', 'exit(1)')
        later = "set later"
        print(*name(), trl.__version__ > "1", end="")
        """,
    )
    assert main(["run", script]) == 0
    out, err = capfd.readouterr()
    assert out == "__main__ set later True" and [line.partition("left out: ")[2] for line in err.splitlines()] == [
        "!pip install trl", "%matplotlib inline", "!ls", "%%bash (its cell)", "%%timeit -n 1 (its cell)",
    ]  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """The calls of a hub that create a repository and upload a folder."""

    committed: ClassVar[list[str]] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        address = f"http://127.0.0.1:{self.server.server_port}/me/tiny"
        answer = {"url": address}
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            answer = {"files": files}
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            self.committed.extend(line["value"].get("path", line["value"].get("summary")) for line in lines)
            answer = {"commitUrl": f"{address}/commit/1", "commitOid": "1", "success": True}
        self.reply(answer)

    def do_GET(self):
        self.reply({"name": "me", "type": "user", "siblings": [], "id": "me/tiny", "sha": "0" * 40})

    def reply(self, answer):
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def test_push_to_hub_uploads_the_trained_model(place, monkeypatch):
    import huggingface_hub

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    script = """
    from trl import SFTConfig, SFTTrainer
    import os
    args = SFTConfig("out", max_steps=1, use_cpu=True, hub_model_id="me/tiny")
    trainer = SFTTrainer(os.environ["MODEL"], args=args, train_dataset=[{"text": "one and two"}] * 4)
    trainer.train()
    trainer.push_to_hub(commit_message="mine", dataset_name="me/rows")
    """
    try:
        assert main(["run", write(place, script)]) == 0
    finally:
        server.shutdown()
        server.server_close()
    assert Hub.committed[0] == "mine" and {"model.safetensors", "tokenizer.json", "README.md"} <= {*Hub.committed}
