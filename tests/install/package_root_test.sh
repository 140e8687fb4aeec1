#!/usr/bin/env bash
# The Debian package in a bare Debian root (debootstrap): installed by apt with what it depends on, asked for its version,
# the demo model served by the packaged configuration as a user without rights, and purged; what is there afterwards
# must be what was there before. Needs root and debootstrap.
#   tests/install/package_root_test.sh PACKAGE.deb [--work FOLDER]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/install/debian_base.sh
package="$(realpath "$1")"
shift
work="${TMPDIR:-/tmp}/flashquant-clean-root"
[[ "${1:-}" != --work ]] || work="$2"
((EUID == 0)) || { echo "package_root_test: needs root (debootstrap, chroot)" >&2; exit 1; }
make_base_tarball bookworm "${work}"

root="${work}/package-root"
server=""
finish() {
  [[ -z "${server}" ]] || kill -KILL "${server}" 2>/dev/null || true
  if mountpoint -q "${root}/proc"; then umount "${root}/proc"; fi
  rm -rf --one-file-system "${root}"
}
trap finish EXIT
rm -rf --one-file-system "${root}"
mkdir -p "${root}"
tar -C "${root}" -xf "${work}/bookworm.tar"
mount -t proc proc "${root}/proc"
use_network_settings "${root}"
failures=0
expect() {  # expect WHAT COMMAND...
  local what="$1"
  shift
  if "$@"; then echo "ok: ${what}"; else echo "FAILED: ${what}"; failures=$((failures + 1)); fi
}
in_root() {
  chroot "${root}" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive "$@" </dev/null
}
as_user() {
  exec chroot "${root}" setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set -all \
    --inh-caps -all env -i PATH=/usr/bin:/bin "$@"
}
# Everything but apt's and dpkg's own records, caches and logs.
all_paths() {
  (cd "${root}" && find . -xdev \( -path ./proc -o -path ./var/lib/apt -o -path ./var/lib/dpkg -o -path ./var/cache \
    -o -path ./var/log -o -path ./tmp \) -prune -o -print | sort)
}

cp "${package}" "${root}/tmp/flashquant.deb"
all_paths >"${work}/before.txt"
in_root apt-get update -qq
in_root apt-get install -y -qq --no-install-recommends /tmp/flashquant.deb >"${work}/install.log" 2>&1 ||
  { tail -n 20 "${work}/install.log" >&2; exit 1; }
echo "installed: $(in_root dpkg-query -W -f '${Package} ${Version}, ${Installed-Size} KB' flashquant), with" \
  "$(grep -c '^Unpacking' "${work}/install.log") packages"
expect "says its version" in_root flashquant --version
expect "dpkg finds no changed file" test -z "$(in_root dpkg --verify flashquant)"
expect "the configuration is the package's" grep -q flashquant <<<"$(in_root dpkg-query -S /etc/flashquant/flashquant.json)"

as_user flashquant serve --config /etc/flashquant/flashquant.json --listen 127.0.0.1:50961 --metrics-listen off \
  >"${work}/package-server.log" 2>&1 &
server=$!
deadline=$((SECONDS + 60))
until (as_user flashquant health --target 127.0.0.1:50961 --timeout 5) >/dev/null 2>&1; do
  if ! kill -0 "${server}" 2>/dev/null || ((SECONDS >= deadline)); then
    tail -n 20 "${work}/package-server.log" >&2
    exit 1
  fi
done
text="$( (as_user flashquant generate --target 127.0.0.1:50961 --prompt 'Once upon a time' --max-tokens 30 \
  --temperature 0) 2>"${work}/counts.txt")"
echo "generated: ${text}"
expect "text is generated" test "${#text}" -gt 40
kill -TERM "${server}"
code=0
wait "${server}" || code=$?
server=""
expect "stops with exit code 0" test "${code}" = 0

in_root apt-get purge -y -qq --auto-remove flashquant >"${work}/purge.log" 2>&1 || tail -n 20 "${work}/purge.log"
all_paths >"${work}/after.txt"
expect "nothing is left and nothing is missing" diff "${work}/before.txt" "${work}/after.txt"
expect "dpkg does not know it any more" bash -c "! chroot '${root}' dpkg-query -W flashquant >/dev/null 2>&1"
echo "package_root_test: ${failures} failed"
((failures == 0))
