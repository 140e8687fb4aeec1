# Sourced by the tests that need a bare Debian: a root of debootstrap (minbase), kept as a tarball so that only the first
# run downloads it. Mirror: FQ_APT_MIRROR, else this machine's own apt sources, else Debian's. Needs root.

# The mirror that this machine uses for suite $1, in either form of apt's source files.
find_mirror() {
  local suite="$1" uri
  if [[ -n "${FQ_APT_MIRROR:-}" ]]; then
    echo "${FQ_APT_MIRROR}"
    return
  fi
  uri="$(cat /etc/apt/sources.list.d/*.sources 2>/dev/null |
    awk -v suite="${suite}" '/^$/ {uri=""} /^URIs:/ {uri=$2} /^Suites:/ {for (i = 2; i <= NF; ++i) if ($i == suite) {print uri; exit}}')"
  [[ -n "${uri}" ]] || uri="$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
    awk -v suite="${suite}" '$1 == "deb" {i = 2; if ($2 ~ /^\[/) {while ($i !~ /\]$/) ++i; ++i} if ($(i + 1) == suite) {print $i; exit}}')"
  echo "${uri:-http://deb.debian.org/debian}"
}

# make_base_tarball SUITE FOLDER: FOLDER/SUITE.tar, unless it is there.
make_base_tarball() {
  local suite="$1" folder="$2"
  local root="${folder}/debootstrap.root"
  [[ ! -f "${folder}/${suite}.tar" ]] || return 0
  echo "==> debootstrap ${suite}"
  mkdir -p "${folder}"
  rm -rf --one-file-system "${root}"
  debootstrap --variant=minbase "${suite}" "${root}" "$(find_mirror "${suite}")" >"${folder}/debootstrap.log" 2>&1 || {
    tail -n 20 "${folder}/debootstrap.log" >&2
    return 1
  }
  tar -C "${root}" -cf "${folder}/${suite}.tar.part" .
  mv "${folder}/${suite}.tar.part" "${folder}/${suite}.tar"
  rm -rf --one-file-system "${root}"
}

# use_network_settings ROOT: name resolution, apt settings (a proxy, for one) and certificates of this machine.
use_network_settings() {
  local root="$1"
  cp /etc/resolv.conf /etc/hosts "${root}/etc/"
  cp -r /etc/apt/apt.conf.d/. "${root}/etc/apt/apt.conf.d/"
  if [[ -d /usr/local/share/ca-certificates ]]; then
    mkdir -p "${root}/usr/local/share/ca-certificates"
    cp -rL /usr/local/share/ca-certificates/. "${root}/usr/local/share/ca-certificates/"
  fi
}
