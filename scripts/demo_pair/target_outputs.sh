#!/usr/bin/env bash
# Decodes training inputs with a trained target: what the draft is distilled on.
#
#   bash scripts/demo_pair/target_outputs.sh runs/export/target/checkpoint_N runs/outputs [COUNT]
#
# Writes runs/outputs/inferences.jsonl for COUNT inputs of each task (default 16000), chosen by a fixed
# seed and sorted by length, so that a batch ends together. Start it again to go on.
set -euo pipefail

checkpoint=$1 folder=$2 count=${3:-16000}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python}

mkdir -p "$folder"
PYTHONPATH=$root/scripts/demo_pair "$python" - "$count" >"$folder/inputs.txt" <<'PYTHON'
import random
import sys

import train
from speculative_t5x.demo import tasks

texts = [text for text, _ in train.corpus_texts()]
chosen = []
for prefix in tasks.PREFIXES.values():
  of_task = sorted({text for text in texts if text.startswith(prefix)})
  chosen += random.Random(0).sample(of_task, min(int(sys.argv[1]), len(of_task)))
print('\n'.join(sorted(chosen, key=len)))
PYTHON
exec "$python" -m speculative_t5x.infer --gin_file="$root/gin_configs/examples/demo.gin" \
  --input="$folder/inputs.txt" --output_dir="$folder" --gin.CHECKPOINT_PATH="$checkpoint" \
  --gin.GAMMA=0 --gin.BATCH_SIZE=64
