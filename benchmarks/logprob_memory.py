"""Peak memory of log-probs and their gradients over a large vocabulary: chunked against naive.

    python benchmarks/logprob_memory.py [--dtype float32] [--tokens 8192] [--hidden 896] [--vocabulary 151936]

Each way runs in a process of its own, forward and backward, and reports by how much its peak resident memory rose over
what it held before (inputs and weights in place, libraries warm). The naive way is `log_softmax(hidden @ weight.T)` and
a gather. It needs about 20 GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from atomrl.atoms.logprobs import fused_token_logprobs


def naive(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.to(hidden.dtype).T
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None])[:, 0]


def chunked(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return fused_token_logprobs(hidden, weight, tokens)[0]


WAYS = {"naive": naive, "chunked": chunked}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak(threading.Thread):
    """The largest resident size, looked at every 5 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest, self.running = 0, True

    def run(self) -> None:
        while self.running:
            self.largest = max(self.largest, resident_bytes())
            time.sleep(0.005)


def measure(way: str, arguments: argparse.Namespace) -> None:
    """Print the rise of the peak in bytes and the seconds of one forward and backward pass."""
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    weight = (0.02 * torch.randn(arguments.vocabulary, arguments.hidden)).requires_grad_()
    hidden = torch.randn(arguments.tokens, arguments.hidden).to(dtype).requires_grad_()
    tokens = torch.randint(0, arguments.vocabulary, (arguments.tokens,))
    small = torch.randn(256, arguments.hidden, dtype=dtype, requires_grad=True)
    WAYS[way](small, torch.randn(512, arguments.hidden, requires_grad=True), tokens[:256] % 512).sum().backward()
    before, peak = resident_bytes(), Peak()
    peak.start()
    start = time.perf_counter()
    WAYS[way](hidden, weight, tokens).mean().backward()
    elapsed = time.perf_counter() - start
    peak.running = False
    peak.join()
    digest = [hidden.grad.double().norm().item(), weight.grad.double().norm().item()]
    print(peak.largest - before, elapsed, *digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=8 * 1024)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    arguments = parser.parse_args()
    if arguments.way:
        measure(arguments.way, arguments)
        return
    peaks = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        rise, elapsed, grad_hidden, grad_weight = map(float, printed)
        peaks[way] = rise
        print(
            f"{way:8} peak +{rise / 1e9:6.2f} GB  {elapsed:6.1f} s  gradient norms {grad_hidden:.6e} {grad_weight:.6e}"
        )
    print(f"chunked / naive: {peaks['chunked'] / peaks['naive']:.3f}")


if __name__ == "__main__":
    main()
