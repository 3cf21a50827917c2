#!/usr/bin/env bash
# The profiling matrix, into logs/, runs/ and results/ of the current folder.
#
#     ./run_profiling.sh              edit the arrays below, or pass any flag of `truemfu sweep`
#
# Other settings (dtype, optimizer, time limit, …) are in profiling_config.json beside this script. A run that
# was stopped goes on where it was; a run with other settings needs another folder, or --rerun all.
set -euo pipefail

TRAINERS=(StandardTrainer DPSGDTrainer DPGhostClippingTrainer DPFastGradientClippingTrainer)
BATCH_SIZES=(4 8)
SEQ_LENGTHS=(512 1024)
MODEL_SIZE=1b

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
with_commas() { local IFS=,; echo "$*"; }

exec "${PYTHON:-python3}" "$here/profiling_script.py" --mode=profile --config="$here/profiling_config.json" \
    --trainers="$(with_commas "${TRAINERS[@]}")" \
    --batch-sizes="$(with_commas "${BATCH_SIZES[@]}")" \
    --seq-lengths="$(with_commas "${SEQ_LENGTHS[@]}")" \
    --model-sizes="$MODEL_SIZE" "$@"
