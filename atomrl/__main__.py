"""`python -m atomrl`: the command `atomrl`, for launchers that start a module (torchrun, accelerate)."""

import os
import sys

# `python -m` looks for modules in the working directory first, which may be somebody's run that is looked at. Users'
# own functions are looked for there last (`functions.search_in`).
if sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from atomrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
