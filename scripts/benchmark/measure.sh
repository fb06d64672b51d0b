#!/usr/bin/env bash
# Measures the demo pair on held-out sentences of each task, greedily: the reports beside this script.
#
#   bash scripts/benchmark/measure.sh [FOLDER]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(realpath -m "${1:-$root/scripts/benchmark/results}")
python=${PYTHON:-python}
inputs=$(mktemp -d)
trap 'rm -r "$inputs"' EXIT

cd "$root"
"$python" - "$inputs" <<'PYTHON'
import pathlib
import sys

from speculative_t5x.demo import tasks

for task in tasks.PREFIXES:
  found = tasks.spread(tasks.examples(tasks.read_pairs(tasks.HELD_OUT), task), 20)
  path = pathlib.Path(sys.argv[1]) / f'{task}.txt'
  path.write_text(''.join(text + '\n' for text, _ in found), encoding='utf-8')
PYTHON
for task in restoration translation; do
  "$python" -m speculative_t5x.measure --gin_file=gin_configs/examples/demo.gin \
    --input="$inputs/$task.txt" --output_dir="$folder/measure_$task"
done
