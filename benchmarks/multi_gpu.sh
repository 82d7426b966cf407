#!/bin/sh
# On a rented machine with two GPUs or more: all that this project has to say of several GPUs, with one command.
#
#     sh benchmarks/multi_gpu.sh                  about 15 minutes; writes runs/multi_gpu/
#     RANKS=4 sh benchmarks/multi_gpu.sh          with four of them
#
# Each part is made although one before it failed; the end says which did. PYTHON is another interpreter that has the
# package (else one is made in .venv); CHECK_ON=cpu tries the script itself, with gloo and
# small shapes, on a machine without GPUs.
set -u
cd "$(dirname "$0")/.."
RANKS=${RANKS:-2}
CHECK_ON=${CHECK_ON:-cuda}
OUT=${OUT:-runs/multi_gpu}
STEPS=10
SMALL=
[ "$CHECK_ON" = cuda ] || { STEPS=2; SMALL=rollout.prompts_per_step=8; SIZES=${SIZES:-3M}; }
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
train() {
    name=$1
    shift
    rm -rf "${OUT:?}/$name"
    part "$name" "$PYTHON" -m atomrl train configs/quickstart.yaml model.path="$MODEL" model.device="$CHECK_ON" \
        output_dir="$OUT" run_name="$name" train.steps="$STEPS" checkpoint.every_steps=5 eval.before=false eval.after=false \
        $SMALL "$@"
}

[ "$CHECK_ON" = cpu ] || part gpu_tests "$PYTHON" -m pytest -q -n 0 tests/test_gpu.py -m gpu
part ranks "$PYTHON" benchmarks/ranks.py --device "$CHECK_ON" --ranks "$RANKS" --steps $((STEPS > 7 ? 7 : STEPS)) \
    ${SIZES:+--sizes $SIZES}
train one_process
train ranks_started_here backend.type=fsdp backend.ranks="$RANKS"
train hybrid backend.type=fsdp backend.ranks="$RANKS" backend.replicas="$RANKS"
train summed_once backend.type=fsdp backend.ranks="$RANKS" backend.reduce=update
train tensor backend.type=fsdp backend.ranks="$RANKS" backend.tensor=2
train sequence backend.type=fsdp backend.ranks="$RANKS" backend.sequence=2 model.pack_rows=true model.dtype=auto
[ "$CHECK_ON" = cpu ] || train cpu_offload backend.type=fsdp backend.ranks="$RANKS" backend.cpu_offload=true
rm -rf "${OUT:?}/torchrun"
part torchrun "$PYTHON" -m torch.distributed.run --nproc-per-node "$RANKS" -m atomrl train configs/quickstart.yaml \
    model.path="$MODEL" model.device="$CHECK_ON" output_dir="$OUT" run_name=torchrun train.steps="$STEPS" \
    eval.before=false eval.after=false $SMALL backend.type=fsdp
part losses "$PYTHON" - "$OUT" <<'END'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/metrics.jsonl")):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if "actor/grad_norm" in row]
    if rows:
        seconds = sorted(row["timing_s/update_actor"] for row in rows)[len(rows) // 2]
        print(f"{path.parent.name:<20} {len(rows):>3} steps, first gradient {rows[0]['actor/grad_norm']:.5f}, update {seconds:.3f} s")
END
[ -z "$FAILED" ] || { echo "FAILED:$FAILED"; exit 1; }
echo "all parts passed; $OUT has what they said"
