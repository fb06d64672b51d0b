#!/usr/bin/env bash
# Installs the tested versions of everything that a run through T5X needs, without Docker: this
# package and T5X's dependencies from PyPI as in `constraints.txt`, and T5X, AirIO and jestimator,
# which are not on PyPI, as source checkouts at fixed commits. For Linux; a second run goes on where
# the first stopped, and updates the package.
#
#   bash scripts/tpu_vm/install.sh [--device tpu|cpu] [--folder FOLDER]
#   source FOLDER/activate
#   python -m t5x.infer …
#
#   --device   tpu installs libtpu too; the default is what the machine has.
#   --folder   what is installed goes there and nowhere else; default .venv_t5x in the checkout.
#
# Environment variables:
#   PYTHON     interpreter to use, a Python 3.11; by default one is looked for, and where there is
#              none, as on the images of TPU VMs, uv installs one in FOLDER.
#   T5X_URL, AIRIO_URL, JESTIMATOR_URL
#              where to fetch the checkouts from, such as a mirror; default GitHub.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
constraints=$root/scripts/tpu_vm/constraints.txt
uv_version=0.13.9

# Name, commit and repository of each checkout. T5X names no versions of the other two; these are
# the ones that it was tested with.
checkouts=(
  "t5x cc342d419ec3e3e9c4bf1df33c82330cafdc1e16 ${T5X_URL:-https://github.com/google-research/t5x}"
  "airio 69897df7d9a427b947a9f7bb4164c7782b43e601 ${AIRIO_URL:-https://github.com/google/airio}"
  "jestimator 326824a477feef6d92e6f44175000907a72899ca ${JESTIMATOR_URL:-https://github.com/google-research/jestimator}"
)

# What the checkouts import; the package's own dependencies are in `pyproject.toml`.
requirements=(
  absl-py cached-property chex clu fiddle flax gin-config grain jax jaxtyping numpy optax
  orbax-checkpoint seqio tensorboard tensorflow tensorflow-datasets tensorstore typing_extensions
)

fail() {
  echo "error: $1" >&2
  exit "${2:-2}"
}

# Whether $1 is a Python of the version that `constraints.txt` was made with.
fits() {
  "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

# Makes the environment with an interpreter that is there, and otherwise with uv.
make_environment() {
  local candidate candidates=(python3.11 python3 python)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    # Debian keeps ensurepip in a package of its own, without which no environment can be made.
    if fits "$candidate" && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "Making $venv with $("$candidate" --version)"
      "$candidate" -m venv "$venv"
      return
    fi
  done
  echo "Making $venv with uv: no Python 3.11 with its venv module was found"
  export PATH=$folder/uv/bin:$PATH UV_PYTHON_INSTALL_DIR=$folder/python
  command -v uv >/dev/null ||
    python3 -m pip install --quiet --disable-pip-version-check --target "$folder/uv" \
      "uv==$uv_version" ||
    fail "Python: expected 3.11 or uv, which installs it, found $(python3 --version 2>&1) and no uv" 1
  uv venv --quiet --clear --seed --no-project --no-config --python "${PYTHON:-3.11}" "$venv" ||
    fail 'Python: expected 3.11, found none that uv could use or install; install it with its venv module, or name one with PYTHON' 1
}

# Fetches commit $2 of repository $3 into folder $1, that commit alone.
check_out() {
  local target=$1 commit=$2 url=$3
  if [ "$(git -C "$target" rev-parse --verify --quiet HEAD 2>/dev/null)" != "$commit" ]; then
    echo "Fetching $url at ${commit:0:7}"
    git init --quiet "$target"
    git -C "$target" fetch --quiet --depth 1 "$url" "$commit"
  fi
  # Also undoes changes: what runs is what was tested.
  git -C "$target" -c advice.detachedHead=false checkout --quiet --force "$commit"
}

folder=$root/.venv_t5x
device=cpu
# Device files of TPU VMs, those of older and those of newer generations.
if [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ]; then device=tpu; fi

while [ $# -gt 0 ]; do
  case $1 in
    --device=* | --folder=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  case $1 in
    --device | --folder)
      [ -n "${2:-}" ] || fail "$1: expected a value, found none"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    *) fail "arguments: expected --device and --folder, found $1" ;;
  esac
done
case $device in
  tpu) requirements+=('jax[tpu]') ;;
  cpu) ;;
  *) fail "--device: expected tpu or cpu, found $device" ;;
esac
[ "$(uname -s)" = Linux ] || fail "system: expected Linux, found $(uname -s)"
if [ -n "${PYTHON:-}" ] && ! fits "$PYTHON"; then
  fail "PYTHON: expected Python 3.11, found $PYTHON: $("$PYTHON" --version 2>&1 | head -n 1)"
fi
command -v git >/dev/null || fail 'git: expected it on PATH, found none'
if [ -e "$folder/venv/bin/python" ] && ! fits "$folder/venv/bin/python"; then
  fail "$folder: expected an environment of Python 3.11, found one of another version; remove it and try again"
fi

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
venv=$folder/venv
python=$venv/bin/python

# Not true either of an environment whose making was interrupted.
"$python" -m pip --version >/dev/null 2>&1 || make_environment

echo "Installing into $venv for $device (the first time this takes some minutes)"
"$python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" \
  "$root" "${requirements[@]}"

path=
for entry in "${checkouts[@]}"; do
  read -r name commit url <<<"$entry"
  check_out "$folder/$name" "$commit" "$url"
  path=$path${path:+:}$folder/$name
done

# Replaces PYTHONPATH rather than adding to it: nothing else may hide what was tested.
{
  echo "# Source this before \`python -m t5x.infer\`."
  printf '. %q\n' "$venv/bin/activate"
  printf 'export PYTHONPATH=%q\n' "$path"
} >"$folder/activate"

# The import needs no device, and must not take one that is in use.
PYTHONPATH=$path JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$python" - <<'PYTHON'
import importlib.metadata
import platform

import airio
import jestimator
import t5x.infer

import speculative_t5x

names = ('jax', 'flax', 'orbax-checkpoint', 'seqio', 'tensorflow')
versions = ', '.join(f'{name} {importlib.metadata.version(name)}' for name in names)
print(f'speculative_t5x {speculative_t5x.__version__} with T5X {t5x.__version__}, '
      f'Python {platform.python_version()}, {versions}')
PYTHON
echo "Done. In a shell: source $(printf %q "$folder/activate")"
