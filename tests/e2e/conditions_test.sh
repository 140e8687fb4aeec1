#!/usr/bin/env bash
# The program in bad surroundings: few descriptors, no threads, a full disk for its log, a bare environment, crashes,
# floods, a wall clock that jumps, a tokenizer that does not fit the weights. Ids are rows of the reliability matrix. conditions_test.sh PROGRAM [CLOCK_JUMP_LIBRARY]
set -euo pipefail
program="$1"
work="$(mktemp -d)"
pid=
finish() {
  [[ -z "${pid}" ]] || kill -9 "${pid}" 2> /dev/null || true
  rm -rf "${work}"
}
trap finish EXIT
fail() { echo "FAILED: $*"; tail -5 "${work}"/*.log 2> /dev/null; exit 1; }
model=deploy/demo-model
flags=(--listen 127.0.0.1:0 --metrics-listen off --threads 1)

# ends CODE TEXT COMMAND...: it ends with that code within 20 s and says so in one line of at least that text.
ends() {
  local wanted="$1" text="$2" code=0; shift 2
  timeout 20 "$@" > "${work}/out.log" 2> "${work}/err.log" || code=$?
  ((code == wanted)) || fail "exit code ${code}, not ${wanted}: $*"
  grep -q -- "${text}" "${work}/err.log" || fail "no '${text}' in: $(tail -2 "${work}/err.log")"
}
# start COMMAND...: a server; its port in ${port}. Its log is ${work}/serve.log.
start() {
  "$@" 2> "${work}/serve.log" &
  pid=$!
  wait_for_serving
}
wait_for_serving() {
  for _ in $(seq 300); do
    port="$(sed -n 's/.*listening on port \([0-9]*\).*/\1/p' "${work}/serve.log")"
    [[ -n "${port}" ]] && grep -q 'serving model' "${work}/serve.log" && return
    kill -0 "${pid}" 2> /dev/null || fail "ended early"
    sleep 0.1
  done
  fail "does not serve"
}
answers() {
  "${program}" generate --target "127.0.0.1:${port}" --prompt "Once upon a time" --max-tokens 3 > "${work}/answer.log" 2>&1 ||
    fail "no answer: $(cat "${work}/answer.log")"
}
# stop [CODE]
stop() {
  local code=0
  kill -TERM "${pid}"
  wait "${pid}" || code=$?
  pid=
  ((code == ${1:-0})) || fail "ended with ${code}"
}

# C8: a hard limit below 4096 descriptors cannot be raised.
ends 71 'open files: hard limit too low' bash -c 'ulimit -n 1000; exec "$@"' - "${program}" serve --model "${model}" "${flags[@]}"

# M25: more ids than rows of the embedding.
cp -r "${model}" "${work}/model"
sed -i 's/"vocab_size": *8192/"vocab_size": 8200/' "${work}/model/config.json"
ends 65 'embed' "${program}" serve --model "${work}/model" "${flags[@]}"

# G1, as far as a machine without a usable card can show it.
if ! command -v nvidia-smi > /dev/null; then
  ends 69 'CUDA\|cuda' "${program}" serve --model "${model}" "${flags[@]}" --backend cuda
fi

# C12: nothing in the environment, odd time zone and language, no home, no place for temporary files, an unknown user
# who may write nowhere.
who=()
if ((EUID == 0)) && command -v setpriv > /dev/null; then
  who=(setpriv --reuid 54321 --regid 54321 --clear-groups)
fi
start "${who[@]}" env -i TZ=Nowhere/Nothing LANG=xx_YY LC_ALL=tlh TMPDIR=/nonexistent HOME=/nonexistent \
  "${program}" serve --model "${model}" "${flags[@]}"
answers
stop

# S11: no thread can be made. Limits on processes do not hold for root, so another user is needed.
if ((${#who[@]} > 0)) && command -v prlimit > /dev/null; then
  code=0
  timeout 20 "${who[@]}" prlimit --nproc=1 "${program}" serve --model "${model}" "${flags[@]}" 2> "${work}/err.log" || code=$?
  ((code == 71)) && grep -q 'threads' "${work}/err.log" || fail "without threads: exit code ${code}, not 71: $(tail -2 "${work}/err.log")"
fi

# S10: the disk that takes the log is full; the service goes on.
"${program}" serve --model "${model}" --listen "127.0.0.1:0" --metrics-listen off --threads 1 2> "${work}/serve.log" &
pid=$!
wait_for_serving
free_port="${port}"
stop
"${program}" serve --model "${model}" --listen "127.0.0.1:${free_port}" --metrics-listen off --threads 1 2> /dev/full &
pid=$!
for _ in $(seq 300); do "${program}" health --target "127.0.0.1:${free_port}" > /dev/null 2>&1 && break; sleep 0.1; done
port="${free_port}"
answers
stop

# O7: no client can fill the log: garbage, other protocols and bad requests leave nothing in it.
start "${program}" serve --model "${model}" "${flags[@]}"
before="$(wc -l < "${work}/serve.log")"
for i in $(seq 150); do
  (exec 3<> "/dev/tcp/127.0.0.1/${port}"; printf 'GET / HTTP/1.1\r\n\r\n' >&3) 2> /dev/null || true
  ((i % 10)) || "${program}" generate --target "127.0.0.1:${port}" --prompt x --top-p 7 > /dev/null 2>&1 || true
done
answers
((before + 5 >= $(wc -l < "${work}/serve.log"))) || fail "clients fill the log: $(tail -3 "${work}/serve.log")"

# Two runs of one load test ask for different prompts: nothing of the second is in the server's prefix cache.
stop
start "${program}" serve --model "${model}" --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 --threads 1
"${program}" loadtest --target "127.0.0.1:${port}" --rate 8,8 --duration 1 --input-tokens 40 --output-tokens 2 \
  > "${work}/load.log" 2>&1 || fail "no load"
exec 3<> "/dev/tcp/127.0.0.1/$(sed -n 's/.*metrics on port \([0-9]*\).*/\1/p' "${work}/serve.log")"
printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3
awk '/^flashquant_prefix_cache_lookup_tokens_total.*hit/ { hits = $NF } /^flashquant_prefix_cache_lookup_tokens_total.*miss/ { misses = $NF }
  END { exit hits != 0 || misses < 400 }' <&3 || fail "prompts were asked for twice"
exec 3>&-

# C13: the wall clock jumps by a day twice a second: no deadline passes, no duration is negative or a day long.
if [[ -n "${2:-}" ]]; then
  stop
  start env LD_PRELOAD="$2" "${program}" serve --model "${model}" --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 --threads 1
  "${program}" loadtest --target "127.0.0.1:${port}" --rate 4 --duration 4 --input-tokens 4 --output-tokens 4 \
    > "${work}/load.log" 2>&1 || fail "no load"
  grep -q ' 0 failed in' "${work}/load.log" || fail "calls failed: $(cat "${work}/load.log")"
  metrics="$(sed -n 's/.*metrics on port \([0-9]*\).*/\1/p' "${work}/serve.log")"
  exec 3<> "/dev/tcp/127.0.0.1/${metrics}"
  printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3
  awk '/_seconds_sum/ && ($NF < 0 || $NF > 3600) { print; bad = 1 } /_seconds_count/ { ++seen } END { exit bad || !seen }' <&3 ||
    fail "durations that cannot be"
  exec 3>&-
fi

# N21: handshakes that fail are counted, and the service goes on.
if command -v openssl > /dev/null && command -v curl > /dev/null; then
  stop
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost -addext \
    subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout "${work}/key.pem" -out "${work}/cert.pem" 2> "${work}/openssl.log"
  chmod 600 "${work}/key.pem"
  start "${program}" serve --model "${model}" --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 --threads 1 \
    --tls-cert "${work}/cert.pem" --tls-key "${work}/key.pem"
  metrics="http://127.0.0.1:$(sed -n 's/.*metrics on port \([0-9]*\).*/\1/p' "${work}/serve.log")/metrics"
  failures() { curl -s "${metrics}" | sed -n 's/^flashquant_tls_handshake_failures_total \([0-9]*\)$/\1/p'; }
  [[ "$(failures)" == 0 ]] || fail "handshakes failed before any did: $(failures)"
  "${program}" health --target "127.0.0.1:${port}" --tls-ca "${work}/cert.pem" > /dev/null || fail "no TLS"
  [[ "$(failures)" == 0 ]] || fail "a good handshake counts as failed"
  (exec 3<> "/dev/tcp/127.0.0.1/${port}"; printf 'GET / HTTP/1.1\r\n\r\n' >&3; timeout 10 cat <&3 > /dev/null) || true
  openssl s_client -connect "127.0.0.1:${port}" -tls1_1 < /dev/null > /dev/null 2>&1 || true
  for _ in $(seq 100); do (($(failures) >= 2)) && break; sleep 0.1; done
  (($(failures) >= 2)) || fail "failed handshakes are not counted: $(failures)"
  "${program}" health --target "127.0.0.1:${port}" --tls-ca "${work}/cert.pem" > /dev/null || fail "no TLS afterwards"
  stop
fi

# L9: a crash ends it by the signal, with one line that names it, and leaves no core file.
for signal in SEGV ABRT; do
  [[ -n "${pid}" ]] || start "${program}" serve --model "${model}" "${flags[@]}"
  grep -q 'Max core file size *0 *0' "/proc/${pid}/limits" || fail "core files are allowed"
  code=0
  kill "-${signal}" "${pid}"
  wait "${pid}" || code=$?
  pid=
  ((code == 128 + $(kill -l "${signal}"))) || fail "SIG${signal}: exit code ${code}"
  grep -q "^flashquant: crashed by signal $(kill -l "${signal}") (flashquant [0-9.]*" "${work}/serve.log" || fail "no line about SIG${signal}"
done
echo passed
