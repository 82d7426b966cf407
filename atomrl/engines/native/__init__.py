"""The engine `native`: Llama, Qwen2 and Qwen3 in plain PyTorch, with C++ kernels on a CPU and Triton on a GPU."""
