"""Models: a readable GPT, transformers' models, adapters, critics and reward models.

Start with `gpt.py`, the decoder of Llama, Qwen2 and Qwen3 in plain PyTorch; `transformers_model.py` trains any other
causal model. `loading.py` loads and saves Hugging Face layout, `attention.py` packs rows and shares prompts, `lora.py`
and `quantized.py` have adapters, `reward_model.py` critics and reward models.
"""
