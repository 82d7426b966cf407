"""Prepare a machine without a GPU for tests of SGLang's server, which is made for GPUs.

    python tools/sglang_cpu.py requirements sglang-0.5.23-....whl    # prints what it needs, for pip
    python tools/sglang_cpu.py prepare                               # in the environment that then has it

The wheel itself, and torchvision, are installed with `--no-deps`. `prepare` puts an `sgl_kernel` there that has every
name and no kernel, so that SGLang can be imported, and empties the part of torchvision that wants compiled operators.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from pathlib import Path

UNUSED = [
    "anthropic",
    "apache-tvm-ffi",
    "av",
    "blobfile",
    "build",
    "cuda-python",
    "datasets",
    "decord2",
    "deepseek-recipe",
    "flash-attn-4",
    "flashinfer_python",
    "humming-kernels",
    "kernels",
    "mistral_common",
    "modelscope",
    "ninja",
    "nvidia-cutlass-dsl",
    "nvidia-mathdx",
    "nvidia-ml-py",
    "nvshmem4py-cu13",
    "openai-harmony",
    "py-spy",
    "quack-kernels",
    "sgl-deep-ep",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sglang-kernel",
    "smg-grpc-servicer",
    "tilelang",
    "timm",
    "tml-renderers",
    "torch",
    "torch_memory_saver",
    "torchaudio",
    "torchcodec",
    "torchvision",
    "watchfiles",
]
"""Kernels for GPUs, pictures and sound, other services; torch is the project's."""
ALSO = ("dill", "cffi")
"""Imported, and asked for by packages that are left out."""
STUB = '''"""Every name of SGLang's kernels, and none of them: on a CPU torch computes."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name}: there are no kernels here")

    missing.__name__ = name
    return missing
'''


def requirements(wheel: str) -> list[str]:
    """Return the requirements that a CPU can use, without those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    found = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return [*(line for line in found if re.split(r"[^\w-]", line)[0] not in UNUSED), *ALSO]


def prepare() -> None:
    """Make SGLang importable in this environment."""
    packages = Path(sysconfig.get_paths()["purelib"])
    stub = packages / "sgl_kernel" / "__init__.py"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(STUB, encoding="utf-8")
    (packages / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare()
    else:
        print("\n".join(requirements(sys.argv[2])))
