# Sourced by engine.sh and quantize.sh: needs `logs`, a folder; sets `failed` to 1 when a check fails.

# check NAME COMMAND...: runs it with its output in a log; prints one line, and the log's end if it failed.
check() {
  local name="$1" begin="$SECONDS"
  shift
  if "$@" >"$logs/$name.log" 2>&1; then
    echo "ok      $name ($((SECONDS - begin)) s)"
  else
    failed=1
    echo "FAILED  $name ($((SECONDS - begin)) s)"
    grep -E "Failure|FAILED|expected|rror|ERROR|flashquant:" "$logs/$name.log" | head -n 40 || tail -n 25 "$logs/$name.log"
  fi
}
