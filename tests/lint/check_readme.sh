#!/usr/bin/env bash
# Every long flag that the program's help knows must be in README.md, for each subcommand: check_readme.sh PROGRAM README
set -euo pipefail
program="$1"
readme="$2"
status=0
subcommands="$("${program}" --help | sed -n '/^[A-Z]*SUBCOMMANDS:\|^Subcommands:/,$p' | sed -n 's/^  \([a-z]\+\) .*/\1/p')"
[[ -n "${subcommands}" ]] || { echo "no subcommand found in ${program} --help"; exit 1; }
for subcommand in ${subcommands}; do
  grep -q "\`${subcommand}\`\|flashquant ${subcommand}" "${readme}" || { echo "README: nothing about ${subcommand}"; status=1; }
  for flag in $("${program}" "${subcommand}" --help | grep -oE -- '(^|[ ,])--[a-z][a-z0-9-]+' | tr -d ' ,' | sort -u); do
    [[ "${flag}" == --help || "${flag}" == --help-all ]] && continue
    grep -qE -- "${flag}([^a-z0-9-]|$)" "${readme}" || { echo "README: no ${flag} (flashquant ${subcommand})"; status=1; }
  done
done
((status == 0)) && echo "README knows every flag of: ${subcommands//$'\n'/ }"
exit "${status}"
