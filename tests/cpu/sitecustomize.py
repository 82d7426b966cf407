"""CPU features that tests pretend to have: `conftest.py` puts this folder on the path of every process they start.

`ATOMRL_TEST_BFLOAT16=1` reports bfloat16 instructions, `0` reports none. What is computed stays the same: torch
emulates the instructions where they are missing.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

ANSWERS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


class ReportBfloat16(MetaPathFinder, Loader):
    """Imports `torch.cpu` as ever, then replaces its two answers about bfloat16."""

    def __init__(self, present: bool) -> None:
        self.present = present

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        for name in ANSWERS:
            assert hasattr(module, name), f"torch.cpu has no {name}: atomrl.models.loading asks for something else now"
            setattr(module, name, lambda: self.present)


if "ATOMRL_TEST_BFLOAT16" in os.environ and "torch.cpu" not in sys.modules:
    sys.meta_path.insert(0, ReportBfloat16({"0": False, "1": True}[os.environ["ATOMRL_TEST_BFLOAT16"]]))
