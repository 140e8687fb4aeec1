#!/usr/bin/env bash
# Installs the distribution packages of docker/apt-packages.txt, and only those that are missing:
#   deploy/install_packages.sh [KIND...]       KIND: the second word of a line there, as in "test" or "package"
# Lines without a kind are always wanted. Works as root or through sudo on Debian 12 and Ubuntu 24.04; does nothing,
# and needs neither network nor root, when everything is there.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
list="${root}/docker/apt-packages.txt"
kinds=" $* "

known="$(sed -n 's/^[^#[:space:]]\+[[:space:]]\+\([^#[:space:]]\+\).*/\1/p' "${list}" | sort -u | tr '\n' ' ')"
for kind in "$@"; do
  if [[ " ${known}" != *" ${kind} "* ]]; then
    echo "install_packages: no packages of kind '${kind}'; kinds: ${known}" >&2
    exit 2
  fi
done

wanted=()
while read -r name kind _; do
  case "${name}" in '' | '#'*) continue ;; esac
  if [[ -z "${kind}" || "${kind}" == '#'* || "${kinds}" == *" ${kind} "* ]]; then
    wanted+=("${name}")
  fi
done <"${list}"

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "install_packages: no apt here; have the equivalents of these installed: ${wanted[*]}" >&2
  exit 0
fi

missing=()
for name in "${wanted[@]}"; do
  state="$(dpkg-query -W -f '${db:Status-Status}' "${name}" 2>/dev/null || true)"
  [[ "${state}" == installed ]] || missing+=("${name}")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "install_packages: missing packages: ${missing[*]}" >&2
    echo "install_packages: become root and run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

echo "Installing ${#missing[@]} packages: ${missing[*]}"
log="$(mktemp)"
trap 'rm -f "${log}"' EXIT
# A dead entry among the configured sources is no reason to stop: the install below says what is really missing.
"${as_root[@]}" apt-get update -qq >"${log}" 2>&1 || tail -n 5 "${log}" >&2
if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >"${log}" 2>&1 </dev/null; then
  tail -n 30 "${log}" >&2
  echo "install_packages: apt-get could not install: ${missing[*]}" >&2
  exit 1
fi
