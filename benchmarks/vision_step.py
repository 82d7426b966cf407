"""Seconds of a GRPO step with pictures: what it saves to compute the vision tower once, beside TRL's step.

    python benchmarks/vision_step.py [--trl FOLDER] [--turns 3] [--steps 4] [--pictures 8] [--completions 8]

One script for TRL's names is run unchanged in processes that take turns: by AtomRL as it is (`kept`: a frozen tower
computes each picture once); with its features dropped before each forward pass (`each pass`); with a picture computed
for each completion and pass, as trainers do that repeat the picture's patches for each row (`each row`); and by TRL, if
`--trl` names a folder with it (`pip install --target FOLDER --no-deps trl==1.16.0`). A random Qwen2.5-VL of 2.3 million
weights, 1.3 million of them the tower's; pictures of 224 x 224, which are 64 tokens; 32 tokens a completion; float32.
The first step of each process is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """
import json, os, sys, time
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, TrainerCallback
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import GRPOConfig, GRPOTrainer

folder, pictures, completions, steps = sys.argv[1], *map(int, sys.argv[2:5])

class Processor(Qwen2_5_VLProcessor):  # without videos, whose processor needs torchvision
    def check_argument_for_proper_class(self, name, argument):
        pass

class Clock(TrainerCallback):
    times = []
    def on_step_end(self, arguments, state, control, **_):
        self.times.append(time.perf_counter())

def made(number):
    colours = torch.randint(0, 255, (7, 7, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
    return Image.fromarray(colours.numpy()).resize((224, 224), Image.NEAREST)

def reward(completions, **_):
    return [float(len(set(str(text))) % 7) for text in completions]

rows = pictures * (steps + 1)
data = Dataset.from_dict({
    "prompt": [[{"role": "user", "content": "What?"}]] * rows, "image": [made(number) for number in range(rows)],
})
config = GRPOConfig(
    output_dir=folder + "/out", per_device_train_batch_size=pictures * completions, num_generations=completions,
    max_completion_length=32, max_steps=steps + 1, learning_rate=1e-6, beta=0.0, report_to="none", logging_steps=1,
    save_strategy="no", bf16=False, use_cpu=True, gradient_checkpointing=False,
    generation_kwargs={"min_new_tokens": 32},
)
tokenizer = AutoTokenizer.from_pretrained(folder)
processor = Processor(
    Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer, None, chat_template=tokenizer.chat_template
)
model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
model.model.visual.requires_grad_(False)
trainer = GRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()],
    processing_class=processor,
)
trainer.train()
gaps = [after - before for before, after in zip(Clock.times, Clock.times[1:])]
with open(os.environ["RESULT"], "w") as file:
    json.dump(gaps, file)
"""
EACH_PASS = """
from atomrl.models.vision import Vision
whole = Vision.inputs
def inputs(self, *arguments):
    self.forget()
    return whole(self, *arguments)
Vision.inputs = inputs
"""
EACH_ROW = """
import itertools
from dataclasses import replace
from atomrl.models.vision import Vision
whole, number, read = Vision.inputs, itertools.count(), {}
def inputs(self, tokens, images):
    self.forget()
    def other(image):
        new = replace(image, name=f"{next(number)}-{image.name}")
        read[new.name] = image
        return new
    original = self.read
    self.read = lambda image: original(read[image.name])
    result = whole(self, tokens, [[other(image) for image in row] for row in images])
    self.read = original
    return result
Vision.inputs = inputs
"""
RUN = "import sys; from atomrl.cli.main import main; sys.exit(main(sys.argv[1:]))"
KINDS = {"kept": "", "each pass": EACH_PASS, "each row": EACH_ROW}


def make_model(folder: Path) -> None:
    """Save the model with its tokenizer and image processor."""
    from tests.tiny_vision import FAMILIES, make_tiny_vision_model

    text, vision, patch = FAMILIES["qwen2_5_vl"]
    text |= {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.02}
    text["rope_parameters"] |= {"mrope_section": [8, 4, 4]}
    text["head_dim"] = 32
    vision |= {"depth": 4, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "out_hidden_size": 128}
    vision["fullatt_block_indexes"] = [3]
    FAMILIES["qwen2_5_vl"] = text, vision, patch
    make_tiny_vision_model(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 56**2, "longest_edge": 224**2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def run(kind: str, folder: Path, arguments: argparse.Namespace) -> list[float]:
    """Return the seconds of each step but the first, in a process of its own."""
    script, result = folder / "script.py", folder / "result.json"
    script.write_text(SCRIPT)
    shutil.rmtree(folder / "out", ignore_errors=True)
    sizes = [str(folder), *map(str, (arguments.pictures, arguments.completions, arguments.steps))]
    path = str(ROOT)
    if kind == "TRL":
        command, path = [sys.executable, str(script), *sizes], arguments.trl
    else:
        command = [sys.executable, "-c", KINDS[kind] + RUN, "run", str(script), *sizes]
    environment = {**os.environ, "PYTHONPATH": path, "RESULT": str(result), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{kind}: {done.stderr[-3000:]}")
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="folder in which TRL is installed")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {kind: [] for kind in [*KINDS, *(["TRL"] if arguments.trl else [])]}
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place))
        for _ in range(arguments.turns):
            for kind, each in seconds.items():
                each += run(kind, Path(place), arguments)
    first = statistics.median(seconds["kept"])
    print(f"{'':<12}{'s a step':>10}{'best':>8}{'to kept':>9}")
    for kind, each in seconds.items():
        print(f"{kind:<12}{statistics.median(each):>10.3f}{min(each):>8.3f}{statistics.median(each) / first:>9.2f}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
