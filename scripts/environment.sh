# Sourced by the other scripts: `make_environment EXTRAS` makes the virtual environment if need be
# and installs the project into it. It sets `root` (the checkout) and `venv` (the environment).
#
# Environment variables:
#   VENV    folder of the environment; default .venv in the checkout.
#   PYTHON  interpreter to make it with; default python3.12, python3.11 or python3, whichever fits.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}

# Whether $1 is a Python that the project supports.
fits() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

# Prints the interpreter to use.
find_python() {
  local candidate candidates=(python3.12 python3.11 python3 python)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    # Debian keeps ensurepip in a package of its own, without which no environment can be made.
    if fits "$candidate" && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  {
    echo 'error: expected Python 3.11 or 3.12 with its venv module; none of these is:'
    for candidate in "${candidates[@]}"; do
      echo "  $candidate: $("$candidate" --version 2>&1 | head -n 1)"
    done
    echo 'Install it (on Debian 12: apt-get install python3-venv; on Ubuntu 24.04: the same), or name'
    echo 'an interpreter: PYTHON=/path/to/python3.12 bash scripts/…'
  } >&2
  return 2
}

make_environment() {
  local extras=$1 python
  if [ -e "$venv/bin/python" ] && ! fits "$venv/bin/python"; then
    echo "error: $venv was made with another Python than 3.11 or 3.12; remove it and try again" >&2
    return 2
  fi
  # Also true of an environment whose making was interrupted.
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || return
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv "$venv" || return
  fi
  echo "Installing speculative_t5x$extras into $venv (the first time this takes some minutes)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$root$extras"
}
