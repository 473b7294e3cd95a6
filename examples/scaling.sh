#!/usr/bin/env bash
# The small example of docs/scaling.md: eight layers unrolled as 1, 2, 4 and 8 loops, in three widths, on three token
# budgets. Finished runs are skipped, interrupted ones resumed. 36 runs, two at a time by default.
#
#   bash examples/scaling.sh [FOLDER] [RUNS_AT_ONCE]
set -euo pipefail
out=${1:-runs/scaling}
at_once=${2:-2}
for steps in 200 400 800; do
  for loops in 1 2 4 8; do
    for width in 32 64 128; do
      echo "--width $width --num-layers $((8 / loops)) --num-loops $loops --steps $steps --eval-every $steps \
--save-every $steps --out $out/w$width-r$loops-s$steps"
    done
  done
done | xargs -P "$at_once" -L 1 loopscope train --preset demo --placement terminal \
  --init scaled --positions rope --warmup 20 --threads 1
