# Sourced by engine.sh, serve.sh and quantize.sh.

# use_programs PREBUILT TARGET...: PREBUILT is a folder of programs with its shared libraries in lib, or
# empty: then the targets are built. Sets `build`, `tests` (where the parity tests are) and `logs`, a folder.
use_programs() {
  local prebuilt="$1"
  shift
  build="${prebuilt:-build/cuda-dev}"
  if [[ -n "$prebuilt" ]]; then
    tests="$prebuilt"
    export LD_LIBRARY_PATH="$prebuilt/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  else
    tests="$build/tests/parity"
    cmake --preset cuda-dev
    cmake --build --preset cuda-dev --target "$@"
  fi
  logs="$build/logs"
  mkdir -p "$logs"
}

# check NAME COMMAND...: runs it with its output in a log; prints one line, and the log's end and sets `failed`
# to 1 if it failed.
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
