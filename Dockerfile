# AtomRL with vLLM and Ray for NVIDIA GPUs. The machine needs a driver for the CUDA of its torch and the NVIDIA container toolkit.
# Not built yet.
#
#     docker build -t atomrl .
#     docker run --gpus all --ipc=host -v $PWD:/work atomrl train configs/qwen2.5-1.5b-gsm8k-24gb.yaml
#
# PyPI's torch brings its CUDA libraries along, so that the base needs a compiler alone (Triton, torch.compile).
FROM python:3.12-slim-trixie
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/atomrl
COPY pyproject.toml README.md LICENSE ./
COPY atomrl atomrl
# The versions of `make distributed`, with which the engines are tested on CPUs; constraints.txt has other versions than vLLM asks for.
RUN pip install --no-cache-dir ".[vllm,ray,lora,hub,math,parquet,wandb,tensorboard]" \
        "vllm==0.32.0" "torch==2.13.0" "transformers==5.19.0" "ray==2.60.0"
WORKDIR /work
ENTRYPOINT ["atomrl"]
CMD ["--help"]
