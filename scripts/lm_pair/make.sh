#!/bin/bash
# The decoder-only demo pair from nothing: training, checkpoints, measurement and card. Interrupt it and
# start it again at will; what is trained is not trained again.
#
#   bash scripts/lm_pair/make.sh RUNS [TARGET_STEPS [DRAFT_STEPS]]
#
# RUNS is a folder for the training states. Steps are 3000 and 2500 by default, which the committed pair had.
set -euo pipefail
runs=$1 target_steps=${2:-3000} draft_steps=${3:-2500}
here=$(dirname "$0")
assets=$(realpath "$here/../../speculative_t5x/demo")/lm
python "$here/train.py" target --dir "$runs/lm_target" --steps "$target_steps"
python "$here/train.py" draft --dir "$runs/lm_draft" --teacher "$runs/lm_target" --steps "$draft_steps"
mkdir -p "$here/results"
for model in target draft; do
  python "$here/../export_model.py" demo_lm $model "$assets/$model" "$runs/lm_$model/state.msgpack" --replace
  cp "$runs/lm_$model/log.jsonl" "$here/results/${model}_log.jsonl"
done
python "$here/evaluate.py" "$assets/evaluation.json"
python "$here/card.py"
