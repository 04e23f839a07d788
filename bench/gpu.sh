#!/usr/bin/env bash
# Everything that is measured on a machine with an NVIDIA GPU, in calls under nine minutes.
#
#   bench/gpu.sh OUT [PART ...] [--from ARCHIVE] [--seconds PART=S ...] [--again]
#                [--wheels DIR] [--backend NAME] [--batch N] [--layers K] [--tests PATH]
#                [--hang S] [--rehearse]
#
# In this order, each a call of its own:
#
#   bench/gpu.sh OUT pytorch      530 s   planned PyTorch steps: faces, numbers, bytes and
#                                         times; twice, as it goes on where it was cut off
#   bench/gpu.sh OUT steps        520 s   training steps of ours beside PyTorch's
#   bench/gpu.sh OUT deepbench    500 s   every engine's time and workspace
#   bench/gpu.sh OUT probe tests  360 s   what this GPU is; the tests that need one
#   bench/gpu.sh OUT torch peers models 530 s   small PyTorch steps; plain cuDNN and
#                                         PyTorch beside ours; whole networks
#   bench/gpu.sh OUT                      all again: what is complete costs nothing
#
# Parts of one call that are usually longer than nine minutes together (all of them, say)
# get a share of that each; --seconds says otherwise.
#
# OUT gets three files: gpu-results.tar.gz (all results so far; gpu-results-2.tar.gz goes
# on from it where it grows beyond 15 MiB), summary.json (how each part ended) and gpu.log.
# They are written anew every few seconds, so that whatever ends a call costs little: the
# layer or the test in progress. The same command again goes on, from the archive in OUT,
# or on another machine from one that was taken away: --from ARCHIVE. A test that crashes
# or takes more than --hang seconds (60) is noted, and the others go on.
#
# The exit status is 0 if all parts are complete, 3 if there is more to do, 1 if something
# failed, 2 if nothing was begun, 128 and the signal's number if it was ended by one.
#
# It needs Python 3.11 ($PYTHON, or python3) with numpy and, on a GPU, CuPy 14 and cuDNN 9
# (PyTorch's will do), and no network. Missing Python packages are taken from wheels in
# DIR ($WHEELS, or wheels/ beside bench/) into a folder that is thrown away; `make
# gpu-wheels` makes that folder where there is a network, 30 MiB for one Python.
# --rehearse runs every part where there is no GPU: small ones, on backend null, whose times
# mean nothing; what only a GPU can answer is told, and its tests, all skipped for want of
# CuPy, are complete. A bare virtual environment does, if NumPy's wheel is in DIR as well:
# pip download --no-deps -d DIR numpy. Options that are given too, such as --backend cpu,
# win.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$root/wheels}
usage() { sed -n '2,/^set -u/{/^set -u/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

out='' from='' named='' parts=() budget=() options=() again=() backend=cuda
rehearsal=() # what --rehearse stands for; argparse takes the last of an option
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --again) again=(--again); shift; continue ;;
    --rehearse) rehearsal=(--backend null --batch 2 --layers 1 --rehearse); shift; continue ;;
    --from | --wheels | --find-links | --seconds | --backend | --batch | --layers | \
      --tests | --hang | --keep-every)
      [ $# -ge 2 ] || { echo "gpu.sh: $1 needs a value" >&2; exit 2; }
      case $1 in
        --wheels | --find-links) wheels=$2 ;;
        --from) from=$2 ;;
        --seconds) budget+=("--set=$2") ;;
        --tests) options+=("$1" "$(realpath -m -- "$2")") ;;
        *) options+=("$1" "$2"); [ "$1" = --backend ] && named=$2 ;;
      esac
      shift 2; continue ;;
    -*) echo "gpu.sh: unknown option $1; --help lists them" >&2; exit 2 ;;
  esac
  if [ -z "$out" ]; then out=$1; else parts+=("$1"); fi
  shift
done
[ -n "$out" ] || { usage >&2; exit 2; }
[ "${#rehearsal[@]}" -eq 0 ] || backend=null
backend=${named:-$backend}
options=("${rehearsal[@]+"${rehearsal[@]}"}" "${options[@]+"${options[@]}"}")
command -v "$python" >/dev/null || { echo "gpu.sh: no $python; set PYTHON" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "gpu.sh: $python is older than Python 3.11; set PYTHON" >&2; exit 2; }
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
: >>"$out/gpu.log" || exit 2 # the shell says why
wheels=$(realpath -m -- "$wheels")
[ -z "$from" ] || from=$(realpath -m -- "$from")
cd "$root" || exit 2

# Results in the making are elsewhere, so that OUT holds few files whatever happens.
scratch=$(mktemp -d 2>/dev/null || mktemp -d -p /tmp 2>/dev/null || mktemp -d -p "$out") ||
  exit 2
work=$scratch/work site=$scratch/site
mkdir "$work" "$site" "$scratch/tmp" || exit 2
begun='' child='' tee=''
pack() { "$python" bench/gpu/archive.py pack "$work" "$out"; }
finish() {
  trap '' INT TERM HUP
  [ -z "$begun" ] || pack
  if [ -n "$tee" ]; then
    exec >&- 2>&-
    wait "$tee"
    [ -z "$begun" ] || pack >/dev/null 2>&1 # with the end of the log
  fi
  rm -rf "$scratch"
}
ended() { # by a signal: what runs writes down what it has
  trap '' INT TERM HUP
  if [ -n "$child" ]; then
    kill "$child" 2>/dev/null
    wait "$child" 2>/dev/null
  fi
  exit $((128 + $1))
}
trap finish EXIT
trap 'ended 1' HUP
trap 'ended 2' INT
trap 'ended 15' TERM
export PYTHONPATH="$site:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# A home that cannot be written to, and a TMPDIR that is not there, cost nothing else.
[ -w "${TMPDIR:-/tmp}" ] || export TMPDIR="$scratch/tmp"
if [ -z "${CUPY_CACHE_DIR:-}" ]; then
  kept=${HOME:-}/.cupy/kernel_cache
  { [ -n "${HOME:-}" ] && mkdir -p "$kept" 2>/dev/null && [ -w "$kept" ]; } ||
    export CUPY_CACHE_DIR="$scratch/cupy"
fi

# Only the standard library is needed for these.
"$python" bench/gpu/packages.py install "$site" "$wheels" "$backend" \
  "${parts[@]+"${parts[@]}"}" || exit 2
plan=$("$python" -m bench.gpu budget "$out" "${parts[@]+"${parts[@]}"}" \
  "${budget[@]+"${budget[@]}"}") || exit 2
earlier=$out/gpu-results.tar.gz
if [ -e "$earlier" ]; then
  [ -z "$from" ] || echo "gpu.sh: $out has results, $from is not read"
elif [ -n "$from" ]; then
  earlier=$from
else
  earlier=''
fi
if [ -n "$earlier" ]; then
  "$python" bench/gpu/archive.py unpack "$earlier" "$work" || exit 2
  [ -s "$out/gpu.log" ] || [ ! -e "$work/gpu.log" ] || cp "$work/gpu.log" "$out/gpu.log"
fi

exec > >(trap '' INT TERM HUP; exec tee -a "$out/gpu.log") 2>&1
tee=$!
echo "== gpu.sh ${parts[*]:-all parts} on $backend, $(date -u '+%Y-%m-%d %H:%M:%S UTC')"
names=()
while read -r part seconds; do
  names+=("$part")
  # The part ends by itself; where it hangs, it is ended.
  timeout --kill-after=5 "$seconds" \
    "$python" -m bench.gpu "$part" "$work" --keep "$out" --seconds "$seconds" \
    "${options[@]+"${options[@]}"}" "${again[@]+"${again[@]}"}" </dev/null &
  child=$!
  wait "$child"
  status=$?
  child=''
  [ "$status" -eq 2 ] && exit 2
  begun=1
  [ "$status" -lt 126 ] || echo "gpu.sh: $part ended with status $status"
done <<<"$plan"
"$python" -m bench.gpu summary "$work" "${names[@]}"
