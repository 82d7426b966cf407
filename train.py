"""`python train.py --config configs/grpo_config.yaml [key=value ...]`: the same as `atomrl train`.

The training loop is `fit` in atomrl/trainer/loop.py.
"""

import sys

from atomrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
