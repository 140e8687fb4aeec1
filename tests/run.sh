#!/usr/bin/env bash
# Installs what is missing, builds, and runs every CPU test:
#   tests/run.sh           preset cpu: every test but the long ones
#   tests/run.sh --full    also the long tests, and the presets asan, tsan, tidy and fuzz
# Third-party test data is read from FQ_TEST_DATA (default: ../shared beside the repository); tests that miss it are
# skipped and named. The last line counts: "N passed, N failed, N skipped". Exit code 0 only if nothing failed, and
# every build and preset went through.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="${PWD}"
export FQ_TEST_DATA="${FQ_TEST_DATA:-${root}/../shared}"
export CTEST_PARALLEL_LEVEL="${CTEST_PARALLEL_LEVEL:-2}"

full=0
for argument in "$@"; do
  case "${argument}" in
    --full) full=1 ;;
    -h | --help)
      sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *)
      echo "tests/run.sh: unknown argument '${argument}' (known: --full, --help)" >&2
      exit 2
      ;;
  esac
done

passed=0
failed=0
skipped=0
skipped_names=()
failed_names=()

# Adds up one JUnit file that CTest wrote. A test that CTest could not start also has status "notrun", without a
# SKIP_ message: that is a failure.
count_results() {
  local preset="$1" file="$2" outcome name
  while read -r outcome name; do
    case "${outcome}" in
      run) passed=$((passed + 1)) ;;
      skip)
        skipped=$((skipped + 1))
        skipped_names+=("${preset}: ${name}")
        ;;
      *)
        failed=$((failed + 1))
        failed_names+=("${preset}: ${name}")
        ;;
    esac
  done < <(awk '
    /<testcase name="/ {
      name = $0; sub(/.*<testcase name="/, "", name); sub(/" classname=.*/, "", name)
      status = $0; sub(/.* status="/, "", status); sub(/".*/, "", status)
      if (status == "disabled") status = "skip"
      if (status != "notrun") print status, name
    }
    /<skipped message="/ && status == "notrun" {
      print ($0 ~ /message="SKIP_/ ? "skip" : "fail"), name
      status = ""
    }' "${file}" | sed -e 's/&lt;/</g' -e 's/&gt;/>/g' -e 's/&quot;/"/g' -e 's/&amp;/\&/g')
}

# Runs `command...` whose tests report to build/PRESET/test_results.xml.
run_preset() {
  local preset="$1" results="build/$1/test_results.xml" failed_before="${failed}" start="${SECONDS}" status=0
  shift
  echo
  echo "==== ${preset}: $*"
  rm -f "${results}"
  "$@" </dev/null || status=$?
  if [[ -f "${results}" ]]; then
    count_results "${preset}" "${results}"
  fi
  if ((status != 0 && failed == failed_before)); then
    failed=$((failed + 1))
    failed_names+=("${preset}: build or test run ended with exit code ${status}")
  fi
  echo "==== ${preset}: $((SECONDS - start)) s"
}

kinds=(test package)
((full)) && kinds+=(bench clang)
bash deploy/install_packages.sh "${kinds[@]}"

run_preset cpu cmake --workflow --preset cpu
if ((full)); then
  run_preset long ctest --preset long
  run_preset asan cmake --workflow --preset asan
  run_preset tsan cmake --workflow --preset tsan
  run_preset tidy cmake --workflow --preset tidy
  run_preset format cmake --build build/tidy --target format-check
  run_preset fuzz cmake --workflow --preset fuzz
fi

echo
if ((${#skipped_names[@]})); then
  echo "Skipped (FQ_TEST_DATA=${FQ_TEST_DATA}):"
  printf '  %s\n' "${skipped_names[@]}"
fi
if ((${#failed_names[@]})); then
  echo "Failed:"
  printf '  %s\n' "${failed_names[@]}"
fi
if ((passed == 0 && failed == 0)); then
  failed=1
  echo "No test ran."
fi
echo "${passed} passed, ${failed} failed, ${skipped} skipped"
((failed == 0))
