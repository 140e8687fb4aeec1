#!/usr/bin/env bash
# Shows that both commands of README work on a machine with nothing on it: makes a bare Debian root with debootstrap,
# clones the committed repository into it (nothing else of this machine but name resolution, apt mirror and CA
# certificates), and runs tests/run.sh and deploy/quickstart.sh there, the latter twice. Needs root and debootstrap.
#   tests/install/clean_root.sh [--suite bookworm] [--work FOLDER] [--data FOLDER] [--skip-tests] [--smollm2] [--commands]
#       [--ccache FOLDER] [--keep-root]
# --data: copy test data into the root too (FQ_TEST_DATA), else the tests that need it are skipped, which is the point.
# --commands: then every command of README.md and deploy/README.md that can run there (readme_commands.py; needs --data).
# --ccache: this machine's compiler cache is used in the root too: minutes less, and the builds' times say nothing then.
# The bare root is kept as a tarball under --work (default: ${TMPDIR:-/tmp}/flashquant-clean-root), so that only the
# first run downloads it. Mirror: FQ_APT_MIRROR, else this machine's own apt sources, else Debian's.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
suite=bookworm
work="${TMPDIR:-/tmp}/flashquant-clean-root"
data=""
cache=""
run_tests=1
smollm2=0
commands=0
keep_root=0
while (($#)); do
  case "$1" in
    --suite | --work | --data | --ccache)
      (($# >= 2)) || { echo "clean_root: $1 needs a value" >&2; exit 2; }
      case "$1" in
        --suite) suite="$2" ;;
        --work) work="$2" ;;
        --data) data="$(realpath "$2")" ;;
        --ccache) cache="$(realpath "$2")" ;;
      esac
      shift 2
      ;;
    --skip-tests) run_tests=0; shift ;;
    --smollm2) smollm2=1; shift ;;
    --commands) commands=1; shift ;;
    --keep-root) keep_root=1; shift ;;
    *) echo "clean_root: unknown argument '$1'" >&2; exit 2 ;;
  esac
done
((EUID == 0)) || { echo "clean_root: needs root (debootstrap, chroot)" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "clean_root: apt-get install debootstrap" >&2; exit 1; }

source tests/install/debian_base.sh
tarball="${work}/${suite}.tar"
root="${work}/root"
mkdir -p "${work}"

unmount() {
  local folder
  for folder in proc ccache; do
    if mountpoint -q "${root}/${folder}"; then umount "${root}/${folder}"; fi
  done
}
# --one-file-system: whatever is still mounted below is not this script's to delete.
remove_root() {
  unmount
  rm -rf --one-file-system "${root}"
}
trap unmount EXIT

make_base_tarball "${suite}" "${work}"

echo "==> bare root from ${tarball}, repository at $(git rev-parse --short HEAD)"
remove_root
mkdir -p "${root}"
tar -C "${root}" -xf "${tarball}"
mount -t proc proc "${root}/proc"
use_network_settings "${root}"
mkdir -p "${root}/src"
git clone --quiet --no-local --depth 1 "file://${PWD}" "${root}/src/flashquant"
test_data=/nonexistent
if [[ -n "${data}" ]]; then
  mkdir -p "${root}/src/shared"
  cp -r "${data}/." "${root}/src/shared/"
  test_data=/src/shared
fi

environment=(PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 CI=true "FQ_TEST_DATA=${test_data}")
if [[ -n "${cache}" ]]; then
  mkdir "${root}/ccache"
  mount --bind "${cache}" "${root}/ccache"
  environment+=(CCACHE_DIR=/ccache CCACHE_BASEDIR=/src/flashquant CCACHE_NOHASHDIR=1)
fi

# in_root NAME COMMAND...: runs it in the root with an empty environment and prints how long it took.
in_root() {
  local name="$1" start status=0
  shift
  echo
  echo "==> ${name}: $*"
  start="$(date +%s.%N)"
  chroot "${root}" /usr/bin/env -i "${environment[@]}" bash -c "cd /src/flashquant && $*" </dev/null || status=$?
  echo "==> ${name}: exit code ${status}, $(awk -v a="${start}" -v b="$(date +%s.%N)" 'BEGIN {printf "%.1f", b - a}') s"
  ((status == 0)) || failed+=("${name}")
}

failed=()
in_root "quick start, first run" bash deploy/quickstart.sh
in_root "quick start, second run" bash deploy/quickstart.sh
if ((smollm2)); then
  in_root "SmolLM2, first run" bash deploy/quickstart.sh --model smollm2
  in_root "SmolLM2, second run" bash deploy/quickstart.sh --model smollm2
fi
if ((run_tests)); then
  in_root "tests" bash tests/run.sh
fi
if ((commands)); then
  # What a new user's machine has anyway.
  in_root "curl, docker-compose, git, python3" \
    apt-get install -y -qq --no-install-recommends curl docker-compose git python3
  in_root "commands of README.md and deploy/README.md" python3 tests/install/readme_commands.py --system \
    --model /src/shared/models/story-22m --skip "'deploy/quickstart.sh|tests/run.sh'"
fi

unmount
((keep_root)) || remove_root
echo
if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "All commands passed in the clean root."
