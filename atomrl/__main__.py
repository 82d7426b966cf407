"""`python -m atomrl`: the command `atomrl`, for launchers that start a module (torchrun, accelerate)."""

import sys

from atomrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
