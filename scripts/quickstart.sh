#!/usr/bin/env bash
# Sets everything up on a fresh machine and runs the demo; arguments go to the demo.
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh --input 'restore: the file could not be opened'
#
# `scripts/environment.sh` tells how to choose the interpreter and the environment's folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment ''
exec "$venv/bin/python" -m speculative_t5x.demo "$@"
