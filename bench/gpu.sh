#!/usr/bin/env bash
# Everything that is measured on a machine with an NVIDIA GPU, in nine minutes at most.
#
#   bench/gpu.sh OUT [PART ...] [--seconds PART=S ...] [--again] [--wheels DIR]
#                [--backend NAME] [--batch N] [--layers K] [--tests PATH]
#
# Parts, in this order: probe deepbench peers tests models (all of them by default).
# What a part has written under OUT stays whatever ends it; run the same command again to
# go on. OUT/summary.json says how each part ended; the exit status is 0 if all are
# complete, 3 if there is more to do, 1 if something failed, 2 if nothing was begun.
#
# It needs Python 3.11 ($PYTHON, or python3) with numpy and, on a GPU, CuPy and cuDNN 9
# (PyTorch's will do), and no network. Missing Python packages are taken from wheels in
# DIR ($WHEELS, or wheels/ beside bench/) into a folder that is thrown away.
# For a rehearsal without a GPU: --backend null.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$root/wheels}
usage() { sed -n '2,/^set -u/{/^set -u/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

out='' parts=() budget=() options=() again=() backend=cuda
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --again) again=(--again); shift; continue ;;
    --wheels | --find-links | --seconds | --backend | --batch | --layers | --tests)
      [ $# -ge 2 ] || { echo "gpu.sh: $1 needs a value" >&2; exit 2; }
      case $1 in
        --wheels | --find-links) wheels=$2 ;;
        --seconds) budget+=("--set=$2") ;;
        *) options+=("$1" "$2"); [ "$1" = --backend ] && backend=$2 ;;
      esac
      shift 2; continue ;;
    -*) echo "gpu.sh: unknown option $1; --help lists them" >&2; exit 2 ;;
  esac
  if [ -z "$out" ]; then out=$1; else parts+=("$1"); fi
  shift
done
[ -n "$out" ] || { usage >&2; exit 2; }
command -v "$python" >/dev/null || { echo "gpu.sh: no $python; set PYTHON" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "gpu.sh: $python is older than Python 3.11; set PYTHON" >&2; exit 2; }
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$root" || exit 2

site=$(mktemp -d) || exit 2
child=''
trap 'rm -rf "$site"' EXIT
trap '[ -n "$child" ] && kill "$child" 2>/dev/null; exit 130' INT TERM
export PYTHONPATH="$site:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# Only the standard library is needed for this one.
"$python" bench/gpu/packages.py "$site" "$wheels" "$backend" \
  "${parts[@]+"${parts[@]}"}" || exit 2
plan=$("$python" -m bench.gpu budget "$out" "${parts[@]+"${parts[@]}"}" \
  "${budget[@]+"${budget[@]}"}") || exit 2

names=()
while read -r part seconds; do
  names+=("$part")
  # The part ends by itself; where it hangs, it is ended.
  timeout --kill-after=5 "$seconds" \
    "$python" -m bench.gpu "$part" "$out" --seconds "$seconds" \
    "${options[@]+"${options[@]}"}" "${again[@]+"${again[@]}"}" </dev/null &
  child=$!
  wait "$child"
  status=$?
  child=''
  [ "$status" -eq 2 ] && exit 2
done <<<"$plan"
"$python" -m bench.gpu summary "$out" "${names[@]}"
