"""GPUs by their data sheets."""

import re
from dataclasses import dataclass, replace

from atomrl.common.errors import did_you_mean
from atomrl.config import ConfigError
from atomrl.trainer.memory import CONTEXT_GIB, GIB, USABLE

_TYPICAL_CARDS = ((9, "4060"), (13, "3060"), (17, "4060ti"), (33, "3090"), (50, "a6000"), (90, "a100"), (1e9, "h200"))
"""(up to GiB, name): the card whose speed is assumed if only a memory size is given."""


@dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU, and the number of GPUs."""

    name: str
    gib: float
    """Memory in GiB."""
    gb_s: float
    """Memory bandwidth in 10^9 bytes a second."""
    tflops: float
    """Dense bfloat16 matrix products with float32 sums; float32 products for a card without bfloat16."""
    bfloat16: bool = True
    """True if the GPU computes in bfloat16."""
    count: int = 1

    @property
    def usable_bytes(self) -> int:
        """Bytes of one card that a plan may use."""
        return int((self.gib - CONTEXT_GIB) * USABLE * GIB)

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in the forward pass if `model.dtype` is `auto`."""
        return 2 if self.bfloat16 else 4

    def __str__(self) -> str:
        cards = f"{self.count} x " if self.count > 1 else ""
        return f"{cards}{self.name} ({self.gib:g} GiB)"


GPUS = {
    gpu.name.lower().replace(" ", ""): gpu
    for gpu in (
        Gpu("T4", 16, 320, 8.1, bfloat16=False),
        Gpu("V100", 32, 900, 15.7, bfloat16=False),
        Gpu("2080 Ti", 11, 616, 13.4, bfloat16=False),
        Gpu("3060", 12, 360, 25),
        Gpu("3070", 8, 448, 40),
        Gpu("3080", 10, 760, 59),
        Gpu("3090", 24, 936, 71),
        Gpu("4060", 8, 272, 30),
        Gpu("4060 Ti", 16, 288, 44),
        Gpu("4070", 12, 504, 58),
        Gpu("4070 Ti Super", 16, 672, 88),
        Gpu("4080", 16, 717, 97),
        Gpu("4090", 24, 1008, 165),
        Gpu("5060 Ti", 16, 448, 47),
        Gpu("5070", 12, 672, 62),
        Gpu("5080", 16, 960, 112),
        Gpu("5090", 32, 1792, 209),
        Gpu("A10", 24, 600, 125),
        Gpu("A10G", 24, 600, 70),
        Gpu("L4", 24, 300, 121),
        Gpu("A40", 48, 696, 150),
        Gpu("A6000", 48, 768, 155),
        Gpu("L40S", 48, 864, 362),
        Gpu("6000 Ada", 48, 960, 364),
        Gpu("A100-40", 40, 1555, 312),
        Gpu("A100", 80, 2039, 312),
        Gpu("PRO 6000", 96, 1792, 503),
        Gpu("H100", 80, 3350, 989),
        Gpu("H200", 141, 4800, 989),
        Gpu("B200", 180, 8000, 2250),
    )
}


def gpu_of(text: str) -> Gpu:
    """Parse the name or memory size of a GPU, with an optional count: `4090`, `RTX 4090`, `2xA100`, `24GiB`, `8x80GiB`.

    Raises:
        ConfigError: the card is not in the table.

    Example:
        >>> gpu_of("2 x RTX 4090").count, gpu_of("4090").gib, gpu_of("80GB").gib
        (2, 24, 80.0)
    """
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(.+)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError("--gpu: give the name of a GPU or its memory, as in 24GiB")
    count, name = int(match[1] or 1), match[2].lower()
    if count < 1:
        raise ConfigError(f"--gpu {text}: give at least one GPU")
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*g(?:i?b)?", name):
        gib = float(size[1])
        like = next(GPUS[card] for most, card in _TYPICAL_CARDS if gib <= most)
        return replace(like, name=f"a GPU as fast as {like.name}", gib=gib, count=count)
    # Without brand, form factor and memory size; the A100 of 40 GiB is the only card that needs its size.
    key = re.sub(r"nvidia|geforce|rtx|gtx|tesla|quadro|[\s_]", "", name)
    key = re.sub(r"(sxm\d?|pcie|nvl|-|80gi?b?$|40gi?b?$)", lambda m: "-40" if m[0].startswith("40") else "", key)
    if key not in GPUS:
        raise ConfigError(
            f"unknown GPU {text!r}: {did_you_mean(key, GPUS, 'supported:')}; or give its memory in GiB, as in 24GiB"
        )
    return replace(GPUS[key], count=count)
