#!/usr/bin/env bash
# Runs `python -m t5x.infer` with this package on a Cloud TPU VM, a single host or a slice of several.
# Prints the commands that it takes, and executes them only with --execute.
#
#   bash scripts/tpu_vm/job.sh STEP OPTION… [-- ARGUMENT…]
#
# Steps; each needs the options in brackets, and all of them may be given to any:
#   create     makes the TPU VM                                [--name --zone --type]
#   install    sends this checkout and installs it             [--name --zone]
#   run        runs t5x.infer with what stands behind --       [--name --zone --type]
#   copy       copies the output folder here                   [--name --zone --output --to]
#   delete     deletes the TPU VM                              [--name --zone]
#   all        all five, and deletes whatever happens          [--name --zone --type --output --to]
#
# Options:
#   --name NAME        of the TPU VM; one that is not in use
#   --zone ZONE        such as us-central2-b
#   --project PROJECT  default: gcloud's own
#   --type TYPE        accelerator type, such as v4-8, v5litepod-16 or v5p-8
#   --version IMAGE    runtime image; default: the one that Google names for the type
#   --output FOLDER    where the arguments make t5x.infer write: gs://… or, on a single host, /…
#   --to FOLDER        where to copy it, on this machine
#   --spot             a cheaper TPU VM, which may be taken away (preempted) at any time
#   --retries N        how often to begin anew on a new TPU VM after that; default 0
#   --keep             leave the TPU VM at the end of `all`
#   --execute          execute the commands
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
  echo "error: $1" >&2
  exit "${2:-2}"
}

# Prints the arguments as words of one shell command.
quoted() {
  local LC_ALL=C word line='' quote="'" escaped="'\\''"
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word="'${word//$quote/$escaped}'"
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

# Prints a command, or prints and executes it.
perform() {
  if [ "$execute" = yes ]; then
    echo "+ $(quoted "$@")" >&2
    "$@"
  else
    quoted "$@"
  fi
}

tpu_vm() {
  perform gcloud compute tpus tpu-vm "$@" "--zone=$zone" ${project:+"--project=$project"} --quiet
}

# Executes a command line on every host at once.
on_hosts() {
  tpu_vm ssh "$name" --worker=all "--command=$1"
}

list() {
  tpu_vm list '--format=value(name.basename(),state)'
}

# Prints the state of the TPU VM, nothing when there is none; fails when gcloud does.
state() {
  list | awk -v name="$name" '$1 == name { print $2 }'
}

# A TPU VM of the same name is somebody's: it must be neither used nor, at the end, deleted.
require_free_name() {
  local found
  if [ "$execute" = no ]; then
    echo "# Must not list $name:"
    list
    return
  fi
  found=$(state) || fail "gcloud: expected the TPU VMs of $zone, found the error above" 1
  [ -z "$found" ] || fail "--name: expected a name not in use, found $name in state $found"
}

create() {
  tpu_vm create "$name" "--accelerator-type=$type" "--version=$version" ${spot:+--spot}
}

# The archive holds the files as they are, committed or not, such as a module of one's own tasks.
install() {
  local archive=$root/dist/$name.tar.gz
  perform mkdir -p "$root/dist" || return
  perform tar -czf "$archive" --exclude=./.git --exclude=./.venv* --exclude=./build --exclude=./dist \
    --exclude=./out* --exclude=./runs --exclude=__pycache__ --exclude=.*_cache \
    --exclude=.hypothesis -C "$root" . || return
  tpu_vm scp "$archive" "$name:speculative_t5x.tar.gz" --worker=all || return
  on_hosts "rm -rf speculative_t5x/checkout && mkdir -p speculative_t5x/checkout\
 && tar -xzf speculative_t5x.tar.gz -C speculative_t5x/checkout\
 && bash speculative_t5x/checkout/scripts/tpu_vm/install.sh --device=tpu --folder=speculative_t5x/env"
}

# In the checkout, so that its gin files and modules are found. JAX_PLATFORMS, because JAX would go
# on without the TPU where it cannot have it. The lock, because gcloud gives the command again when
# the connection breaks, and the first run may still have the TPU: the second waits for it.
run() {
  local start='python -m t5x.infer'
  if [ "$hosts" = several ]; then
    # As `python -m`, but the hosts find each other first: Orbax needs it to read a checkpoint, and
    # when one host fails the others end too, instead of waiting for it at the price of a slice.
    start="python -c 'import jax, runpy; jax.distributed.initialize();\
 runpy.run_module(\"t5x.infer\", run_name=\"__main__\", alter_sys=True)'"
  fi
  on_hosts "cd speculative_t5x/checkout && . ../env/activate\
 && JAX_PLATFORMS=tpu,cpu flock ../run.lock $start $(quoted "${arguments[@]}")"
}

copy() {
  perform mkdir -p "$to" || return
  case $output in
    gs://*) perform gcloud storage rsync --recursive "$output" "$to" ${project:+"--project=$project"} ;;
    *) tpu_vm scp --recurse "$name:$output/*" "$to" --worker=0 ;;
  esac
}

# Tries again, because a TPU VM that is left over costs money.
delete() {
  local pause
  for pause in 10 30 0; do
    tpu_vm delete "$name" && return
    sleep "$pause"
  done
  echo "error: $name: expected it to be deleted, found the error above; it costs money as long as" \
    "it is there: gcloud compute tpus tpu-vm delete $name --zone=$zone" >&2
  return 1
}

install_and_run() {
  install && run
}

# Performs step $1, which ends in a run, on as many TPU VMs as it takes.
persist() {
  local step=$1 left=$retries code found
  if [ "$execute" = no ] && [ "$left" != 0 ]; then
    echo "# At most $left times, if this fails and the TPU VM was preempted: delete, create, install, run."
  fi
  while true; do
    "$step" && return
    code=$?
    # gcloud tries for a minute to connect anew before it fails, so the state is up to date by now.
    found=$(state) || found=unknown
    case $found in
      PREEMPTED | TERMINATED) ;;
      *) left=0 ;;
    esac
    if [ "$left" = 0 ]; then
      echo "error: $step: expected exit code 0, found $code; the TPU VM's state is ${found:-none}" >&2
      return "$code"
    fi
    left=$((left - 1))
    echo "The TPU VM was preempted; beginning anew, $left more times at most." >&2
    delete && create || return
    step=install_and_run
  done
}

finish() {
  local code=$? found=unknown
  # Ctrl-C must not end the deletion.
  trap '' HUP INT TERM
  trap - EXIT
  # None is there when its making was refused.
  if [ "$execute" = yes ]; then found=$(state) || found=unknown; fi
  if [ "$keep" = no ] && [ -n "$found" ]; then
    delete || [ "$code" != 0 ] || code=1
  fi
  exit "$code"
}

all() {
  require_free_name
  # From here on a TPU VM of this name is this job's, also one that was made in part.
  trap finish EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  create || return
  persist install_and_run || return
  copy
}

step=${1:-}
case $step in
  create | install | run | copy | delete | all) shift ;;
  -h | --help)
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}"
    exit
    ;;
  *) fail "step: expected create, install, run, copy, delete or all, found ${step:-none}" ;;
esac

name='' zone='' project='' type='' version='' output='' to='' spot='' retries=0 keep=no execute=no
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --name=* | --zone=* | --project=* | --type=* | --version=* | --output=* | --to=* | --retries=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      ;;
  esac
  case $1 in
    --name | --zone | --project | --type | --version | --output | --to | --retries)
      case ${2:-} in
        '' | --*) fail "$1: expected a value, found ${2:-none}" ;;
      esac
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    --spot | --keep | --execute)
      printf -v "${1#--}" yes
      shift
      ;;
    --)
      shift
      arguments=("$@")
      break
      ;;
    *) fail "options: expected one of those that --help names, found $1" ;;
  esac
done

case $step in
  create | run) required='name zone type' ;;
  install | delete) required='name zone' ;;
  copy) required='name zone output to' ;;
  all) required='name zone type output to' ;;
esac
for option in $required; do
  [ -n "${!option}" ] || fail "--$option: expected a value for the step $step, found none"
done

[[ $name =~ ^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$ ]] ||
  fail "--name: expected lower-case letters, digits and hyphens, found $name"
[[ $retries =~ ^(0|[1-9][0-9]{0,3})$ ]] || fail "--retries: expected a number, found $retries"

hosts=one
if [ -n "$type" ]; then
  [[ $type =~ ^[a-z0-9]+-[1-9][0-9]{0,4}$ ]] ||
    fail "--type: expected an accelerator type such as v4-8 or v5litepod-16, found $type"
  # The number counts cores (v2, v3, v4, v5p) or chips (v5e, v6e); one host has at most 8 of either.
  [ "${type##*-}" -le 8 ] || hosts=several
  # https://cloud.google.com/tpu/docs/runtimes
  if [ -z "$version" ]; then
    case $type in
      v2-* | v3-* | v4-*) version=tpu-ubuntu2204-base ;;
      v5litepod-*) version=v2-alpha-tpuv5-lite ;;
      v5p-*) version=v2-alpha-tpuv5 ;;
      v6e-*) version=v2-alpha-tpuv6e ;;
      *) fail "--type: expected v2, v3, v4, v5litepod, v5p or v6e, or --version, found $type" ;;
    esac
  fi
fi

output=${output%/}
if [ -n "$output" ]; then
  # scp has the host's shell expand a path.
  [[ $output =~ ^(gs://[^/]+/.+|/[A-Za-z0-9_./+-]+)$ ]] ||
    fail "--output: expected gs://BUCKET/FOLDER or an absolute path of plain characters, found $output"
  # Each host of a slice looks for what is done already, so they must all see the same folder.
  [[ $hosts = one || $output = gs://* ]] ||
    fail "--output: expected gs://BUCKET/FOLDER for $type, which is several hosts, found $output"
fi

case $step in
  run | all)
    [ "${#arguments[@]}" -gt 0 ] || fail "arguments: expected those of t5x.infer behind --, found none"
    case " ${arguments[*]} " in
      *"$output"*) ;;
      *) echo "note: no argument contains $output, so it must be in a gin file" >&2 ;;
    esac
    ;;
esac

if [ "$execute" = yes ]; then
  command -v gcloud >/dev/null || fail 'gcloud: expected it on PATH, found none'
else
  echo 'Dry run: nothing is executed without --execute.' >&2
fi

case $step in
  create)
    require_free_name
    create
    ;;
  run) persist run ;;
  *) "$step" ;;
esac
