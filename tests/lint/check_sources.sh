#!/usr/bin/env bash
# One rule over one source tree: check_sources.sh RULE ROOT. Prints "file:line: what is wrong" and exits 1 if the rule
# is broken, 0 if not, 2 if called wrongly. Each rule is a function rule_NAME below; tests/lint/CMakeLists.txt runs it
# over the repository and, to show that it can fail, over fixtures/NAME, a small tree that breaks it. The rules are
# text searches on purpose: quick, and easy to read. They do not replace the compiler or clang-tidy.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# find_sources FOLDERS EXTENSIONS...: C++ files below the folders that exist, without the fixtures of this folder.
find_sources() {
  local folders=() names=() folder extension
  for folder in $1; do
    [[ -d "${folder}" ]] && folders+=("${folder}")
  done
  shift
  for extension in "$@"; do
    names+=(-o -name "*.${extension}")
  done
  ((${#folders[@]})) || return 0
  find "${folders[@]}" -path tests/lint/fixtures -prune -o -type f \( "${names[@]:1}" \) -print | sort
}

# search REGEX: "file:line: text" for each match in the files named on standard input; comments after // are ignored.
search() {
  local file
  while IFS= read -r file; do
    sed 's@//.*@@' "${file}" | grep -nE -- "$1" | sed "s@^@${file}:@" || true
  done
}

all_code="kernels engine server tests"
product_code="kernels engine server"

rule_includes() {
  find_sources "${product_code}" h cc cu cuh | xargs -r grep -nHoE '^[[:space:]]*#[[:space:]]*include[[:space:]]*[<"][^>"]+' |
    awk -v rules="${here}/include_rules.txt" '
      BEGIN {
        while ((getline line < rules) > 0) {
          if (line ~ /^#/ || line ~ /^[ \t]*$/) continue
          n = split(line, column, /[ \t]+/)
          if (n < 3) { print rules ": bad line: " line; continue }
          ++count; file[count] = column[1]; ours[count] = column[2]; foreign[count] = column[3]
        }
      }
      {
        split($0, part, ":")
        path = part[1]; header = $0; sub(/^.*[<"]/, "", header)
        rule = 0
        for (i = 1; i <= count; ++i) if (path ~ file[i]) { rule = i; break }
        if (!rule) { print path ":" part[2] ": no line of include_rules.txt covers this file"; next }
        if (header ~ /^\.\.?\//) print path ":" part[2] ": relative include of " header
        else if (header ~ /^(kernels|engine|server|tests|proto|flashquant)\//) {
          if (header !~ ours[rule]) print path ":" part[2] ": may not include " header
        } else if (foreign[rule] != "-" && header ~ foreign[rule]) print path ":" part[2] ": may not include " header
      }'
}

rule_tests_registered() {
  local file
  find_sources tests cc | { grep -E '_(test|fuzz|bench)\.cc$' || true; } | while IFS= read -r file; do
    sed 's/#.*//' "$(dirname "${file}")/CMakeLists.txt" 2>/dev/null |
      grep -qE "(^|[^a-zA-Z0-9_])$(basename "${file}")" ||
      echo "${file}:1: not listed in $(dirname "${file}")/CMakeLists.txt"
  done
}

rule_using_namespace() { find_sources "${all_code}" h cuh | search '\busing[[:space:]]+namespace\b'; }

# 400 lines is the limit; files named in long_files.txt, each with a reason, may have up to 600.
rule_file_size() {
  local file lines
  find_sources "${all_code}" h cc cu cuh | while IFS= read -r file; do
    lines="$(wc -l <"${file}")"
    if ((lines > 600)); then
      echo "${file}:600: ${lines} lines, the hard limit is 600"
    elif ((lines > 400)) && ! grep -qE "^${file}[[:space:]]+[^[:space:]]" "${here}/long_files.txt"; then
      echo "${file}:400: ${lines} lines, the limit is 400 (tests/lint/long_files.txt: exceptions)"
    fi
  done
}

rule_std_regex() { find_sources "${product_code}" h cc cu cuh | search 'std::(basic_)?regex|#include[[:space:]]*<regex>'; }

rule_no_sleep_in_tests() {
  find_sources tests h cc | search '\b(sleep_for|sleep_until|SleepFor|usleep|nanosleep)\b|(^|[^a-zA-Z0-9_.])sleep\('
}

rule_no_disabled_tests() { find_sources tests cc h | search '\bDISABLED_|#define[[:space:]]+private[[:space:]]+public'; }

# main.cc and *_main.cc may exit; server/shutdown.cc must be able to when gRPC's own shutdown hangs.
rule_no_throw_or_exit() {
  find_sources "${product_code}" h cc | { grep -vE '(^|/)(main|[a-z0-9_]+_main)\.cc$|^server/shutdown\.cc$' || true; } |
    search '(^|[^a-zA-Z0-9_"])throw([[:space:];]|$)|(^|[^a-zA-Z0-9_.>"])(std::)?(exit|_exit|quick_exit)\('
}

rule_no_fast_math() {
  { find_sources "${all_code}" h cc cu cuh; find . -path './build*' -prune -o -path ./tests/lint -prune -o \
    \( -name CMakeLists.txt -o -name '*.cmake' -o -name CMakePresets.json \) -print; } |
    xargs -r grep -nHE -- '-ffast-math|--?use_fast_math|-Ofast|funsafe-math' || true
}

# Paths that exist on one developer's machine only.
rule_machine_paths() {
  find . \( -path './build*' -o -path ./.git -o -path ./tests/lint -o -path ./third_party -o -path ./deploy/demo-model \) -prune -o \
    -type f -size -600k -print0 | xargs -0r grep -nHIE '(^|[^a-zA-Z0-9_.~-])/(home|Users|work|mnt)/[a-zA-Z0-9_.-]+' || true
}

# Not for NAME-inl.h, which Highway includes once per instruction set and guards its own way.
rule_pragma_once() {
  local file
  find_sources "${all_code}" h cuh | { grep -v -- '-inl\.h$' || true; } | while IFS= read -r file; do
    grep -q '^#pragma once' "${file}" || echo "${file}:1: no #pragma once"
  done
}

# Every file says at its top what is in it; a .cc file may leave that to the header of the same name.
rule_file_comment() {
  local file first
  { find_sources "${all_code}" h cc cu cuh; find_sources "proto" proto; find_sources "deploy tests docker" sh cmake; } |
    while IFS= read -r file; do
      first="$(sed -n -e '/^#!/d' -e '/^[[:space:]]*$/d' -e p "${file}" | head -n 1)"
      [[ "${first}" == //* || "${first}" == '# '* || (-f "${file%.cc}.h" && "${file}" == *.cc) ]] ||
        echo "${file}:1: does not start with a file comment"
    done
}

if (($# != 2)) || ! declare -F "rule_$1" >/dev/null || [[ ! -d "$2" ]]; then
  echo "usage: check_sources.sh RULE ROOT; rules: $(declare -F | sed -n 's/.* rule_//p' | tr '\n' ' ')" >&2
  exit 2
fi
cd "$2"
found="$("rule_$1")"
if [[ -n "${found}" ]]; then
  echo "${found}"
  echo "rule $1 is broken ($(wc -l <<<"${found}") places)"
  exit 1
fi
echo "rule $1 holds"
