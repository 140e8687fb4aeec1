#!/usr/bin/env bash
# Builds an image without a Docker engine (Debian's buildah, vfs storage, chroot isolation, base made by debootstrap) and
# shows what it is worth: size over its base, labels, time from start to READY as user 65532 on a read-only root without
# capabilities, generated text, files it wrote (none), exit code and time after SIGTERM. Needs root, buildah, debootstrap.
#   tests/docker/image_test.sh [cpu|cuda] [--work FOLDER] [--architectures LIST] [--package FILE] [--keep] [--built]
# cuda: the toolkit of this machine (CUDA_HOME, default /usr/local/cuda) is mounted into the build stage read-only; the
# image has no GPU here, so the server in it runs on the CPU. --architectures: what to compile for, default all.
# --package takes a Debian package that was made before in place of the build stage: minutes less, and not the whole proof.
# --keep leaves the image in FOLDER/images, --built tests the one that was left there.
# Builds the committed tree (HEAD). CI does not run this: it compiles everything once more (README "Tests").
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/install/debian_base.sh
kind=cpu
work="${TMPDIR:-/tmp}/flashquant-clean-root"
keep=0
built=0
package=""
architectures=""
while (($#)); do
  case "$1" in
    cpu | cuda) kind="$1"; shift ;;
    --work) work="$2"; shift 2 ;;
    --architectures) architectures="$2"; shift 2 ;;
    --keep) keep=1; shift ;;
    --package) package="$(realpath "$2")"; shift 2 ;;
    --built) built=1; keep=1; shift ;;
    *) echo "image_test: unknown argument '$1'" >&2; exit 2 ;;
  esac
done
((EUID == 0)) || { echo "image_test: needs root (debootstrap, chroot)" >&2; exit 1; }
for tool in buildah debootstrap openssl unshare setpriv; do
  command -v "${tool}" >/dev/null || { echo "image_test: needs ${tool}" >&2; exit 1; }
done
limit_mb=120
[[ "${kind}" == cpu ]] || limit_mb=900

store="${work}/images"
mkdir -p "${store}"
b() { buildah --root "${store}/root" --runroot "${store}/run" --storage-driver vfs "$@"; }
context="$(mktemp -d)"
certificates="$(mktemp -d)"
container=""
server=""
finish() {
  [[ -z "${server}" ]] || kill -KILL "${server}" 2>/dev/null || true
  [[ -z "${container}" ]] || b rm "${container}" >/dev/null 2>&1 || true
  rm -rf "${context}" "${certificates}"
}
trap finish EXIT
failures=0
expect() {  # expect WHAT COMMAND...
  local what="$1"
  shift
  if "$@"; then echo "ok: ${what}"; else echo "FAILED: ${what}"; failures=$((failures + 1)); fi
}
seconds_since() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN {printf "%.2f", b - a}'; }
files_of() { find "$1" -xdev -type f -printf '%P %s\n' | sort; }

make_base_tarball bookworm "${work}"
if ! b inspect --type image localhost/fq-base >/dev/null 2>&1; then
  base="$(b from scratch)"
  b add "${base}" "${work}/bookworm.tar" / >/dev/null
  b commit --rm "${base}" localhost/fq-base >/dev/null 2>&1
fi

# The context's build stage becomes one that only holds the given package (and cuBLAS).
replace_build_stage() {
  local file="${context}/docker/${kind}.Dockerfile" cublas=""
  mkdir "${context}/packages"
  cp "${package}" "${context}/packages/"
  if [[ "${kind}" == cuda ]]; then
    mkdir "${context}/cublas"
    cp -L "${CUDA_HOME:-/usr/local/cuda}"/lib64/libcublas{,Lt}.so.[0-9][0-9] "${context}/cublas/"
    cublas="COPY cublas /cublas"
  fi
  awk -v cublas="${cublas}" '
    /^FROM / && ++stage == 1 {print "FROM scratch AS build\nCOPY packages /packages"; print cublas; next}
    stage != 1' "${file}" >"${file}.new"
  mv "${file}.new" "${file}"
}

build() {
  local start arguments
  echo "==> build of ${kind} at $(git rev-parse --short HEAD)"
  git archive HEAD | tar -C "${context}" -x
  arguments=(--format docker --isolation chroot --build-arg BASE_IMAGE=localhost/fq-base --pull-never
    --build-arg REVISION="$(git rev-parse HEAD)")
  if [[ "${kind}" == cuda ]]; then
    arguments+=(--build-arg BUILD_IMAGE=localhost/fq-base -v "$(realpath "${CUDA_HOME:-/usr/local/cuda}"):/usr/local/cuda:ro")
    [[ -z "${architectures}" ]] || arguments+=(--build-arg CUDA_ARCHITECTURES="${architectures}")
  fi
  [[ -z "${package}" ]] || replace_build_stage
  start="$(date +%s.%N)"
  b build "${arguments[@]}" -f "${context}/docker/${kind}.Dockerfile" -t "localhost/flashquant:${kind}" "${context}" \
    >"${store}/build-${kind}.log" 2>&1 || { tail -n 40 "${store}/build-${kind}.log" >&2; exit 1; }
  echo "built in $(seconds_since "${start}") s"
}
((built)) || build

container="$(b from --pull-never "localhost/flashquant:${kind}")"
root="$(b mount "${container}")"
base="$(b from --pull-never localhost/fq-base)"
files_of "$(b mount "${base}")" >"${store}/base.txt"
b rm "${base}" >/dev/null
# Files that are new or of another size; what the image removed of its base does not count against them.
files_of "${root}" | comm -13 "${store}/base.txt" - >"${store}/added-${kind}.txt"
added_mb="$(awk '{sum += $NF} END {printf "%d", (sum + 999999) / 1000000}' "${store}/added-${kind}.txt")"
echo "image adds ${added_mb} MB in $(wc -l <"${store}/added-${kind}.txt") files, whole image" \
  "$(files_of "${root}" | awk '{sum += $NF} END {printf "%d", sum / 1000000}') MB"
expect "adds less than ${limit_mb} MB" test "${added_mb}" -lt "${limit_mb}"
setting() { b inspect --type image --format "$1" "localhost/flashquant:${kind}"; }
expect "runs as 65532" test "$(setting '{{.Docker.Config.User}}')" = 65532:65532
expect "has a health check" grep -q health <<<"$(setting '{{.Docker.Config.Healthcheck}}')"
expect "is labelled with its revision" \
  git cat-file -e "$(setting '{{index .Docker.Config.Labels "org.opencontainers.image.revision"}}')^{commit}"
expect "has no file that its user may write" \
  test -z "$(find "${root}" -xdev \( -user 65532 -o -perm -o+w \) \( -type f -o -type d -not -perm -1000 \) -print -quit)"

# in_image [NAME=VALUE...] COMMAND...: as the engine would with --read-only, --cap-drop ALL and no-new-privileges; the
# image's own variables; nothing writable but what a process makes in memory. The folder of certificates is at /media.
mapfile -t variables < <(setting '{{range .Docker.Config.Env}}{{println .}}{{end}}' | sed '/^$/d')
in_image() {
  exec unshare --mount bash -c 'root="$1"; shift
    mount --bind "${root}" "${root}" && mount -t proc proc "${root}/proc" && mount --rbind /dev "${root}/dev" &&
      mount --bind "$1" "${root}/media" && mount -o remount,bind,ro "${root}" || exit 125
    shift
    exec chroot "${root}" setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set -all \
      --inh-caps -all env -i "$@"' in_image "${root}" "${certificates}" "${variables[@]}" \
    FLASHQUANT_LISTEN_ADDRESS=127.0.0.1:50951 FLASHQUANT_METRICS_ADDRESS=127.0.0.1:9951 "$@"
}
# The image's own check; its variables are those of the server that it asks.
mapfile -t check < <(setting '{{range .Docker.Config.Healthcheck.Test}}{{println .}}{{end}}' | sed '1d;/^$/d')
health() { (in_image "$@" "${check[@]}") >/dev/null 2>&1; }

(in_image sh -c 'touch /tmp/x') 2>/dev/null && { echo "FAILED: the root is writable"; failures=$((failures + 1)); }
touch "${work}/before"
start="$(date +%s.%N)"
in_image flashquant serve >"${store}/server-${kind}.log" 2>&1 &
server=$!
deadline=$((SECONDS + 60))
until health; do
  kill -0 "${server}" 2>/dev/null || { cat "${store}/server-${kind}.log" >&2; exit 1; }
  ((SECONDS < deadline)) || { echo "FAILED: not ready within 60 s"; exit 1; }
done
echo "start to READY: $(seconds_since "${start}") s"
expect "the server runs as 65532 without capabilities" grep -qE '^CapEff:[[:space:]]*0+$' "/proc/${server}/status"
expect "and as that user" test "$(awk '/^Uid:/ {print $2}' "/proc/${server}/status")" = 65532
text="$( (in_image flashquant generate --target 127.0.0.1:50951 --prompt 'Once upon a time' --max-tokens 40 \
  --temperature 0 --json) 2>&1)" || true
echo "${text}" | tail -n 1
expect "text is generated" grep -q '"finished"' <<<"${text}"
# A long answer is running when the signal comes: the drain lets it end.
rm -f "${store}/answer.json"
(in_image flashquant generate --target 127.0.0.1:50951 --prompt 'The old king' --max-tokens 200 --ignore-eos \
  --temperature 0 --json) >"${store}/answer.json" 2>&1 &
client=$!
until grep -qs '"accepted"' "${store}/answer.json"; do kill -0 "${client}" 2>/dev/null || break; done
start="$(date +%s.%N)"
kill -TERM "${server}"
code=0
wait "${server}" || code=$?
server=""
stopped="$(seconds_since "${start}")"
echo "SIGTERM to exit: ${stopped} s, exit code ${code}"
expect "exit code 0" test "${code}" = 0
expect "within the drain" awk -v s="${stopped}" 'BEGIN {exit !(s < 30)}'
wait "${client}" || true
expect "the answer that was running ended" grep -q '"finished"' "${store}/answer.json"

# With TLS the check follows by itself.
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=server -keyout "${certificates}/key.pem" \
  -out "${certificates}/cert.pem" 2>/dev/null
chown -R 65532:65532 "${certificates}"
tls=(FLASHQUANT_TLS_CERT_FILE=/media/cert.pem FLASHQUANT_TLS_KEY_FILE=/media/key.pem)
in_image "${tls[@]}" flashquant serve >"${store}/server-${kind}-tls.log" 2>&1 &
server=$!
deadline=$((SECONDS + 60))
until health "${tls[@]}" || ((SECONDS >= deadline)) || ! kill -0 "${server}" 2>/dev/null; do :; done
expect "with TLS the health check follows" health "${tls[@]}"
if health; then echo "FAILED: a check in plain text is content with TLS"; failures=$((failures + 1)); fi
kill -TERM "${server}"
wait "${server}" || true
server=""
expect "nothing was written below its root" \
  test -z "$(find "${root}" -xdev -newer "${work}/before" -type f -print -quit)"

((keep)) || b rmi "localhost/flashquant:${kind}" >/dev/null 2>&1 || true
echo "image_test ${kind}: ${failures} failed"
((failures == 0))
