#!/usr/bin/env bash
# Plans the paper's pairs on the slices of README.md's table; needs the extra `tpu`. Minutes each.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
results=scripts/tpu_plans/results
mkdir -p "$results"

plan() {  # pair, topology, chips that share the target, the paper's alpha at T = 0
  python -m speculative_t5x.tpu --gin_file="gin_configs/models/t5_1_1_xxl_$1.gin" --topology="$2" \
    --partitions "$3" --gamma=7 --alpha="$4" --json="$results/xxl_$1_${2//:/_}_$3.json"
}

plan small v5p:2x2x1 1 .75
plan small v5e:2x4 8 .75
plan small v4:2x2x1 4 .75
plan small v6e:2x2 4 .75
plan base v5p:2x2x1 1 .80
plan large v5p:2x2x1 1 .82
python scripts/tpu_plans/table.py "$results"
