"""Redirects `trl` and `unsloth` in each Python process that a script of `atomrl run` starts.

Python imports a module of this name when it starts; `atomrl.redirect.install` puts this folder on `PYTHONPATH`.
"""

import contextlib
import importlib.machinery
import os
import sys

if __name__ == "sitecustomize":
    with contextlib.suppress(ImportError):  # another Python, without AtomRL
        import atomrl.redirect

        atomrl.redirect.install()
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    own = importlib.machinery.PathFinder.find_spec("sitecustomize", others)  # the machine's
    if own is not None and own.loader is not None:
        own.loader.exec_module(sys.modules["sitecustomize"])
