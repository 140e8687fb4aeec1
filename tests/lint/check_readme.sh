#!/usr/bin/env bash
# Every long flag that the program's help knows must be in README.md, for each subcommand and each of its own
# subcommands: check_readme.sh PROGRAM README
set -euo pipefail
program="$1"
readme="$2"
status=0

# subcommands_of WORDS...: the subcommands of the program, or of a subcommand, one a line.
subcommands_of() {
  "${program}" "$@" --help | sed -n '/^[A-Z]*SUBCOMMANDS:\|^Subcommands:/,$p' | sed -n 's/^  \([a-z]\+\) .*/\1/p'
}

# check WORDS...: one subcommand and what is below it.
check() {
  local flag child
  grep -q "\`$*\`\|flashquant $*" "${readme}" || { echo "README: nothing about $*"; status=1; }
  for flag in $("${program}" "$@" --help | grep -oE -- '(^|[ ,])--[a-z][a-z0-9-]+' | tr -d ' ,' | sort -u); do
    [[ "${flag}" == --help || "${flag}" == --help-all ]] && continue
    grep -qE -- "${flag}([^a-z0-9-]|$)" "${readme}" || { echo "README: no ${flag} (flashquant $*)"; status=1; }
  done
  for child in $(subcommands_of "$@"); do
    check "$@" "${child}"
  done
}

subcommands="$(subcommands_of)"
[[ -n "${subcommands}" ]] || { echo "no subcommand found in ${program} --help"; exit 1; }
for subcommand in ${subcommands}; do
  check "${subcommand}"
done
((status == 0)) && echo "README knows every flag of: ${subcommands//$'\n'/ }"
exit "${status}"
