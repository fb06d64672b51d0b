#!/usr/bin/env bash
# Plans the paper's pairs on the slices of README.md's tables; needs the extra `tpu`. Minutes each.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
results=scripts/tpu_plans/results
mkdir -p "$results"

plan() {  # target, draft, topology, chips that share the target, name, further arguments
  python -m speculative_t5x.tpu --gin_file="gin_configs/models/t5_1_1_$1_$2.gin" --topology="$3" \
    --partitions "$4" --gamma=7 --json="$results/$1_$2_${3//:/_}_$4$5.json" "${@:6}"
}

# The paper's alphas at T = 0.
plan xxl small v5p:2x2x1 1 '' --alpha=.75
plan xxl small v5e:2x4 8 '' --alpha=.75
plan xxl small v4:2x2x1 4 '' --alpha=.75
plan xxl small v6e:2x2 4 '' --alpha=.75
plan xxl base v5p:2x2x1 1 '' --alpha=.80
plan xxl large v5p:2x2x1 1 '' --alpha=.82
# Long outputs and large batches.
for target in xl xxl; do
  for slice in 'v5p:2x2x1 1' 'v5e:2x4 8' 'v4:2x2x1 4' 'v6e:2x2 4'; do
    # shellcheck disable=SC2086
    plan "$target" small $slice _long --batch_size=64 --output_length=512 \
      --verify_largest_batch
  done
done
# Copies of the pair in place of partitions.
plan xl small v5e:2x4 1 _copies --batch_size=8 --output_length=512
python scripts/tpu_plans/table.py "$results"
