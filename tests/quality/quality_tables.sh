#!/usr/bin/env bash
# The quality tables of README.md, all of them: story-22m on its held-out text and on WikiText-2,
# calibrated on the held-out text's part that is not scored, and once more calibrated on the part of
# WikiText-2 that is not scored. Two hours of CPU time at 240 windows, six minutes on an H200 with 16
# cores; not part of the test run. Results: README.md beside this.
#
# Usage: tests/quality/quality_tables.sh [-b FLASHQUANT] [-w WINDOWS] WORK_DIR
# Folders that are in WORK_DIR already are not made again.
set -euo pipefail
cd "$(dirname "$0")/../.."

binary=build/cpu/flashquant
windows=240
while getopts "b:w:" option; do
  case "$option" in
    b) binary=$OPTARG ;;
    w) windows=$OPTARG ;;
    *) exit 64 ;;
  esac
done
shift $((OPTIND - 1))
work=${1:?usage: tests/quality/quality_tables.sh [-b FLASHQUANT] [-w WINDOWS] WORK_DIR}
data="${FQ_TEST_DATA:-../shared}"
heldout="$data/models/story-22m/heldout.txt"
wiki="$data/wikitext2/wiki.test.raw"
[[ -r "$wiki" ]] || wiki="$data/data/wikitext2/wiki.test.raw"
few=(rtn:128:0 gptq:128:0 gptq:64:0 spqr:128:0.01 spqr:128:0.03 spqr:32:0.03)

# Scored are the first WINDOWS windows of 512 tokens; calibration begins where 240 of them end.
table() { # TITLE WORK TEXT CALIBRATION CONFIG ...
  local title=$1 folder=$2 text=$3 calibration=$4
  shift 4
  echo
  echo "$title"
  echo
  tests/quality/quality_table.sh -b "$binary" -w "$windows" -t "$text" -C "$calibration" -s 122880 -n 60416 \
    -o "$folder" "$@"
}

mkdir -p "$work/heldout" "$work/wiki"
table "Scored: heldout. Calibrated: heldout." "$work/heldout" "$heldout" "$heldout"
table "Scored: WikiText-2. Calibrated: heldout." "$work/heldout" "$wiki" "$heldout"
table "Scored: heldout. Calibrated: WikiText-2." "$work/wiki" "$heldout" "$wiki" "${few[@]}"
table "Scored: WikiText-2. Calibrated: WikiText-2." "$work/wiki" "$wiki" "$wiki" "${few[@]}"
