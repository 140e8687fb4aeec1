#!/usr/bin/env bash
# Installs a build below a folder and makes its Debian package (CPack), without root: what is in them, where their files
# point, and that the installed program serves the installed demo model by the installed configuration.
#   package_test.sh BUILD_FOLDER [CMAKE]
# Checks that need dpkg-dev or systemd-analyze are left out by name where those are missing.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build="$(realpath "$1")"
cmake="${2:-cmake}"
work="$(mktemp -d)"
server=""
finish() {
  [[ -z "${server}" ]] || kill -KILL "${server}" 2>/dev/null || true
  rm -rf "${work}"
}
trap finish EXIT
failures=0
expect() {  # expect WHAT COMMAND...
  local what="$1"
  shift
  if "$@" >"${work}/output" 2>&1; then
    echo "ok: ${what}"
  else
    echo "FAILED: ${what}"
    tail -n 20 "${work}/output"
    failures=$((failures + 1))
  fi
}
files_below() { (cd "$1" && find . -type f | sort); }

echo "==> cmake --install --prefix"
prefix="${work}/prefix"
expect "installs" "${cmake}" --install "${build}" --prefix "${prefix}" --strip
config="${prefix}/etc/flashquant/flashquant.json"
expect "the configuration names the installed model" grep -qF "\"${prefix}/share/flashquant/demo-model\"" "${config}"
expect "the unit starts the installed program" \
  grep -qxF "ExecStart=${prefix}/bin/flashquant serve --config ${config}" "${prefix}/lib/systemd/system/flashquant.service"
expect "the installed configuration is accepted" "${prefix}/bin/flashquant" serve --config "${config}" --check-config
# A configuration that somebody edited stays.
echo '{"model": {"path": "/edited"}}' >"${config}"
expect "installs again" "${cmake}" --install "${build}" --prefix "${prefix}" --strip
expect "keeps an edited configuration" grep -q /edited "${config}"

unit="${prefix}/lib/systemd/system/flashquant.service"
if command -v systemd-analyze >/dev/null; then
  expect "systemd accepts the unit and has nothing to say about it" \
    bash -c "systemd-analyze verify '${unit}' >'${work}/verify' 2>&1 && ! grep flashquant '${work}/verify'"
  # In tenths: below 2.0; an unconfined service has 9.6.
  expect "the unit is confined" systemd-analyze security --offline=true --threshold=20 --no-pager "${unit}"
else
  echo "left out: systemd-analyze"
fi

echo "==> Debian package"
if ! command -v dpkg-shlibdeps >/dev/null || ! command -v dpkg-deb >/dev/null; then
  echo "left out: dpkg-dev"
else
  expect "is made" "$(dirname "$(command -v "${cmake}")")/cpack" --config "${build}/CPackConfig.cmake" -B "${work}/pack"
  package="$(find "${work}/pack" -maxdepth 1 -name '*.deb')"
  root="${work}/root"
  dpkg-deb -x "${package}" "${root}"
  dpkg-deb -e "${package}" "${work}/control"
  expect "belongs to root and has no writable file" \
    bash -c "! dpkg-deb -c '${package}' | grep -vE '^[d-]rwxr-xr-x root/root|^-rw-r--r-- root/root'"
  expect "holds nothing outside /usr and /etc/flashquant" \
    bash -c "! (cd '${root}' && find . -type f) | grep -vE '^\./(usr/|etc/flashquant/)'"
  expect "names what it links" grep -qE '^Depends: .*libgrpc.*libprotobuf' "${work}/control/control"
  expect "lists its configuration" grep -qx /etc/flashquant/flashquant.json "${work}/control/conffiles"
  expect "the unit is that of /usr" grep -qxF \
    'ExecStart=/usr/bin/flashquant serve --config /etc/flashquant/flashquant.json' "${root}/usr/lib/systemd/system/flashquant.service"
  expect "no file of it names this build" bash -c "! grep -rlF '${build}' '${root}/usr/lib' '${root}/etc' '${work}/control'"
  for script in postinst prerm postrm; do
    expect "${script} is a shell script" sh -n "${work}/control/${script}"
  done
  expect "checksums hold" bash -c "cd '${root}' && md5sum --quiet -c '${work}/control/md5sums'"
fi

echo "==> the installed program serves"
port=$((20000 + RANDOM % 10000))
"${prefix}/bin/flashquant" serve --model "${prefix}/share/flashquant/demo-model" --listen "127.0.0.1:${port}" \
  --metrics-listen off --backend cpu >"${work}/server.log" 2>&1 &
server=$!
deadline=$((SECONDS + 60))
until "${prefix}/bin/flashquant" health --target "127.0.0.1:${port}" --timeout 5 >/dev/null 2>&1; do
  if ! kill -0 "${server}" 2>/dev/null || ((SECONDS >= deadline)); then
    cat "${work}/server.log"
    echo "FAILED: not ready"
    exit 1
  fi
done
expect "text is generated" "${prefix}/bin/flashquant" generate --target "127.0.0.1:${port}" --prompt "Once upon a time" \
  --max-tokens 8 --temperature 0
kill -TERM "${server}"
code=0
wait "${server}" || code=$?
server=""
expect "stops with exit code 0" test "${code}" = 0
echo "package_test: ${failures} failed"
((failures == 0))
