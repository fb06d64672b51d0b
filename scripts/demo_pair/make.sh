#!/bin/bash
# The demo pair from nothing: training, checkpoints, measurement and card. Interrupt it and start it again
# at will; what is trained is not trained again.
#
#   bash scripts/demo_pair/make.sh RUNS [TARGET_STEPS [FIRST_STEPS [SECOND_STEPS]]]
#
# RUNS is a folder for the training states. The draft learns in two stages, on the corpus and then on what
# the target writes. Its network is that of gin_configs/models/demo.gin, which `shapes.py` selected.
set -euo pipefail
runs=$1 target_steps=${2:-16000} first_steps=${3:-2500} second_steps=${4:-8000}
here=$(dirname "$0")
assets=$(realpath "$here/../../speculative_t5x/demo")
target=$runs/export/checkpoint_$target_steps

distil() {  # input, folder, steps, where the draft begins, whose texts
  python -m speculative_t5x.distil --gin_file=gin_configs/examples/demo_distil.gin --input="$1" \
    --held_out="$runs/validation.jsonl" --gin.NUM_HELD_OUT=128 --output_dir="$2" \
    --gin.TRAIN_STEPS="$3" --gin.DRAFT_CHECKPOINT_PATH="$4" --gin.EXAMPLES="$5" \
    --gin.CHECKPOINT_PATH="$target"
}

python "$here/train.py" --dir "$runs/target" --steps "$target_steps" --dropout_rate 0.05
python "$here/../export_model.py" demo target "$runs/export" "$runs"/target/state_*.msgpack

python "$here/corpus.py" "$runs/validation.jsonl" --inputs 64 --validation
python "$here/corpus.py" "$runs/corpus.jsonl"
distil "$runs/corpus.jsonl" "$runs/draft_first" "$first_steps" None references
python "$here/corpus.py" "$runs/inputs.jsonl" --inputs 12000
distil "$runs/inputs.jsonl" "$runs/draft" "$second_steps" \
  "$runs/draft_first/checkpoint_$first_steps" target

mkdir -p "$here/results"
python "$here/../export_model.py" demo target "$assets/target" "$runs"/target/state_*.msgpack --replace
python "$here/../export_model.py" demo draft "$assets/draft" "$runs/draft/state.msgpack" --replace
for model in target draft; do
  cp "$runs/$model/log.jsonl" "$here/results/${model}_log.jsonl"
done
python "$here/evaluate.py" "$assets/evaluation.json"
python "$here/card.py"
