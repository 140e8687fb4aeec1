#!/usr/bin/env bash
# The HAProxy profile (deploy/haproxy/haproxy.cfg) between our own client and a server with tokens: streams, errors with
# their details, what the proxy must not let through, and a cancelled connection (N25). proxy_test.sh PROGRAM.
# Exits 77 (skipped) when haproxy or openssl is not installed.
set -euo pipefail

program="$1"
for tool in haproxy openssl; do
  command -v "${tool}" > /dev/null || { echo "skipped: needs ${tool}"; exit 77; }
done
work="$(mktemp -d)"
pids=()
finish() {
  for pid in "${pids[@]}"; do kill "${pid}" 2> /dev/null || true; done
  wait || true
  rm -rf "${work}"
}
trap finish EXIT

fail() { echo "FAILED: $*"; tail -20 "${work}"/*.log; exit 1; }
# wait_for SECONDS COMMAND...: repeats it until it succeeds.
wait_for() {
  local end=$((SECONDS + $1)); shift
  until "$@" > "${work}/wait.out" 2>&1; do
    ((SECONDS < end)) || fail "not within the time: $*: $(cat "${work}/wait.out")"
    sleep 0.1
  done
}

"${program}" token alice > "${work}/tokens" 2> "${work}/secret"
chmod 600 "${work}/tokens"
sed 's/.*: //' "${work}/secret" > "${work}/token"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost \
  -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout "${work}/key.pem" -out "${work}/cert.pem" 2> "${work}/openssl.log"
cat "${work}/cert.pem" "${work}/key.pem" > "${work}/proxy.pem"

"${program}" serve --model deploy/demo-model --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 \
  --token-file "${work}/tokens" --threads 1 2> "${work}/serve.log" &
pids+=($!)
wait_for 30 grep -q 'listening on port' "${work}/serve.log"
server="127.0.0.1:$(sed -n 's/.*listening on port \([0-9]*\).*/\1/p' "${work}/serve.log")"
wait_for 60 "${program}" health --target "${server}"

# A free port: the kernel's own choice for a listener that is closed again.
port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
export FQ_PROXY_BIND="127.0.0.1:${port}" FQ_PROXY_CERT="${work}/proxy.pem" FQ_SERVER="${server}"
haproxy -c -f deploy/haproxy/haproxy.cfg > "${work}/check.log" 2>&1 || fail "haproxy refuses the configuration"
haproxy -db -f deploy/haproxy/haproxy.cfg > "${work}/haproxy.log" 2>&1 &
pids+=($!)
client=(--target "127.0.0.1:${port}" --tls-ca "${work}/cert.pem")
wait_for 30 "${program}" health "${client[@]}"

ask() { "${program}" generate "${client[@]}" --prompt "Once upon a time" --max-tokens 5 "$@"; }
ask --temperature 0 --token-file "${work}/token" > "${work}/proxied" || fail "no answer through the proxy"
"${program}" generate --target "${server}" --prompt "Once upon a time" --max-tokens 5 --temperature 0 \
  --token-file "${work}/token" > "${work}/direct"
cmp "${work}/proxied" "${work}/direct" || fail "the proxy changes the answer"

ask 2> "${work}/error" && fail "served without a token"
grep -q 'UNAUTHENTICATED: CREDENTIALS_MISSING' "${work}/error" || fail "details lost: $(cat "${work}/error")"
ask --top-p 7 --token-file "${work}/token" 2> "${work}/error" && fail "bad request served"
grep -q 'INVALID_ARGUMENT: PARAMETER_OUT_OF_RANGE: sampling.top_p' "${work}/error" || fail "details lost"

# status METHOD PATH [HEADERS...]: the HTTP status that the proxy itself gives.
status() {
  local method="$1" path="$2"; shift 2
  curl -s -o /dev/null -w '%{http_code}' --http2 --cacert "${work}/cert.pem" -X "${method}" "$@" "https://localhost:${port}${path}" \
    --resolve "localhost:${port}:127.0.0.1"
}
if command -v curl > /dev/null; then
  [[ "$(status GET /flashquant.v1.InferenceService/GetModel)" == 405 ]] || fail "GET passes"
  [[ "$(status POST /grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo)" == 404 ]] || fail "reflection passes"
  [[ "$(status POST /flashquant.v1.InferenceService/GetModel -H "x-long: $(head -c 20000 /dev/zero | tr '\0' x)")" != 200 ]] ||
    fail "a header of 20000 bytes passes"
fi

# The proxy dies in the middle of an answer: the client must see an error, never a short success, and the server nothing left.
"${program}" generate "${client[@]}" --prompt "Once upon a time" --ignore-eos --token-file "${work}/token" \
  > "${work}/cut" 2> "${work}/cut.err" &
running=$!
wait_for 20 test -s "${work}/cut"
kill -9 "${pids[1]}"
wait "${running}" && fail "a stream that was cut ended as a success"
grep -q 'UNAVAILABLE' "${work}/cut.err" || fail "unexpected end: $(cat "${work}/cut.err")"
kill -USR1 "${pids[0]}"
for _ in $(seq 100); do
  grep -q 'state: 0 calls open, 0 waiting, 0 running' "${work}/serve.log" && { echo "passed"; exit 0; }
  sleep 0.1
  kill -USR1 "${pids[0]}"
done
fail "the server still works for a client that is gone"
