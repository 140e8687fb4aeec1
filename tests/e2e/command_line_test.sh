#!/usr/bin/env bash
# What the program says to somebody who does not know it yet: the mistakes of a first hour name what to do next, on
# stderr, with the exit code that README states. command_line_test.sh PROGRAM
set -euo pipefail
program="$1"
folder="$(mktemp -d)"
trap 'rm -rf "${folder}"' EXIT
failed=0

# says CODE TEXT ARGUMENTS...: the command ends with the code and its stderr contains the text.
says() {
  local code="$1" text="$2" status=0 error
  shift 2
  error="$("${program}" "$@" 2>&1 >/dev/null </dev/null)" || status=$?
  if ((status != code)) || [[ "${error}" != *"${text}"* ]]; then
    printf 'flashquant %s: exit code %s (must be %s), stderr must contain "%s":\n%s\n' \
      "$*" "${status}" "${code}" "${text}" "${error}"
    failed=1
  fi
}

says 64 "no subcommand 'help' (flashquant --help lists them)" help
says 64 "no subcommand 'sreve'" sreve --model deploy/demo-model
says 64 "A subcommand is required" # nothing at all
says 64 "--modell" serve --modell deploy/demo-model
says 78 "required (--model DIR)" serve
says 66 "${folder}/none: open: No such file or directory" complete --model "${folder}/none" --prompt x
says 66 "${folder}: not a model folder (it has no config.json)" complete --model "${folder}" --prompt x
says 66 "${folder}: not a model folder (it has no config.json)" inspect "${folder}"
says 66 "${folder}: not a model folder (it has no config.json)" quantize --input "${folder}" --output "${folder}/out"
says 65 "not a model folder" inspect README.md
says 64 "give a unit, as in 24GiB" inspect deploy/demo-model --plan --gpu-memory 24
touch "${folder}/something"
says 64 "--overwrite replaces a model folder" quantize --input tests/data/tiny_models/llama --output "${folder}"
says 69 "is a server running at 127.0.0.1:1" generate --target 127.0.0.1:1 --prompt x
says 64 "Exactly 1 option from [--prompt,--prompt-ids] is required" generate
says 64 "--system requires --chat" generate --prompt x --system y
says 64 "excludes" generate --prompt-ids 1,2 --chat
one_token=(complete --model deploy/demo-model --prompt-ids 1 --max-tokens 1)
if [[ "$("${program}" "${one_token[@]}" --backend cuda 2>&1 || true)" == *"without CUDA"* ]]; then
  says 69 "the preset cuda" "${one_token[@]}" --backend cuda
  says 69 "the preset cuda" bench kernel
fi
exit "${failed}"
