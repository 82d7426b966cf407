#!/bin/sh
# On a rented machine with two GPUs or more: all that this project has to say of several GPUs, with one command.
#
#     sh benchmarks/multi_gpu.sh                  about 15 minutes; writes runs/multi_gpu/
#     RANKS=4 sh benchmarks/multi_gpu.sh          with four of them
#
# Runs of several ranks are compared with one of one process: loss and gradient norm of each step, and the weights at the
# end, within 1e-4 in float32, and within 0.1 of one in bfloat16 where that is what they compute in. Each part is made
# although one before it failed; the end says which did, and is then 1. PYTHON is another interpreter that has the package
# (else one is made in .venv); CHECK_ON=cpu tries the script itself, with gloo and small shapes, on a machine without GPUs.
set -u
cd "$(dirname "$0")/.."
RANKS=${RANKS:-2}
CHECK_ON=${CHECK_ON:-cuda}
OUT=${OUT:-runs/multi_gpu}
STEPS=10
SMALL=
[ "$CHECK_ON" = cuda ] || { STEPS=2; SMALL=train.rows_per_update=8; SIZES=${SIZES:-3M}; }
mkdir -p "$OUT"
if [ -z "${PYTHON:-}" ]; then
    make .venv/installed-test > "$OUT/setup.log" 2>&1 || { echo "make failed: $OUT/setup.log"; exit 1; }
    PYTHON=.venv/bin/python
fi
GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || exit 1
if [ "$CHECK_ON" = cuda ] && [ "$GPUS" -lt "$RANKS" ]; then
    echo "torch sees $GPUS GPUs, and RANKS=$RANKS"
    exit 1
fi
nvidia-smi topo -m > "$OUT/machine.txt" 2>&1
FAILED=
part() {
    name=$1
    shift
    echo "== $name: $*"
    "$@" > "$OUT/$name.log" 2>&1 || { echo "   FAILED, see $OUT/$name.log"; FAILED="$FAILED $name"; }
    tail -n 12 "$OUT/$name.log"
}

MODEL=$OUT/model
[ -d "$MODEL" ] || "$PYTHON" -c "from tests.tiny import make_tiny_model as m; from pathlib import Path
m(Path('$MODEL'), 'qwen2', hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, head_dim=64)"
# Given rows, so that no drawn token tells two runs apart; a larger epsilon than Adam's, with which a weight whose gradient
# is nothing but rounding would move by its sign.
SETTINGS="configs/quickstart_sft.yaml sft.gpt=null model.path=$MODEL model.device=$CHECK_ON output_dir=$OUT
    train.steps=$STEPS train.learning_rate=1e-3 train.adam_eps=1e-3 checkpoint.every_steps=5 $SMALL"
train() {
    name=$1
    shift
    rm -rf "${OUT:?}/$name"
    part "$name" "$PYTHON" -m atomrl train $SETTINGS run_name="$name" "$@"
}

[ "$CHECK_ON" = cpu ] || part gpu_tests "$PYTHON" -m pytest -q -n 0 tests/conformance/test_gpu.py -m gpu
part ranks "$PYTHON" benchmarks/ranks.py --device "$CHECK_ON" --ranks "$RANKS" --steps $((STEPS > 7 ? 7 : STEPS)) \
    ${SIZES:+--sizes $SIZES}
train one_process
train ranks_started_here backend.type=fsdp backend.ranks="$RANKS"
train hybrid backend.type=fsdp backend.ranks="$RANKS" backend.replicas="$RANKS"
train summed_once backend.type=fsdp backend.ranks="$RANKS" backend.reduce=update
train tensor backend.type=fsdp backend.ranks="$RANKS" backend.tensor=2
rm -rf "${OUT:?}/torchrun"
part torchrun "$PYTHON" -m torch.distributed.run --nproc-per-node "$RANKS" -m atomrl train $SETTINGS run_name=torchrun \
    backend.type=fsdp
SEQUENCE="backend.type=fsdp backend.ranks=$RANKS backend.sequence=2 model.pack_rows=true"
same() {
    name=$1 first=$2 within=$3
    shift 3
    for run in "$@"; do set -- "$@" "$OUT/$run"; shift; done
    part "$name" "$PYTHON" benchmarks/same_runs.py "$OUT/$first" "$@" --within "$within"
}
if [ "$CHECK_ON" = cuda ]; then
    train cpu_offload backend.type=fsdp backend.ranks="$RANKS" backend.cpu_offload=true
    train one_in_bfloat16 model.dtype=bfloat16
    train sequence $SEQUENCE model.dtype=bfloat16 # its attention on a GPU has no float32
    same same one_process 1e-4 ranks_started_here hybrid summed_once tensor torchrun cpu_offload
    same same_in_bfloat16 one_in_bfloat16 0.1 sequence
else
    train sequence $SEQUENCE
    same same one_process 1e-4 ranks_started_here hybrid summed_once tensor torchrun sequence
fi
rm -rf "${OUT:?}/rollouts"
part rollouts "$PYTHON" -m atomrl train configs/quickstart.yaml model.path="$MODEL" model.device="$CHECK_ON" \
    output_dir="$OUT" run_name=rollouts train.steps="$STEPS" rollout.prompts_per_step=8 eval.before=false eval.after=false \
    backend.type=fsdp backend.ranks="$RANKS"
[ -z "$FAILED" ] || { echo "FAILED:$FAILED"; exit 1; }
echo "all parts passed; $OUT has what they said"
