"""Load and soak gates K1 to K15: each prints its figures beside its limits and fails when one is broken.

    tests/soak/run.sh PROGRAM [--short] [--only K1,K8] [--contamination-test BINARY]

--short: minutes instead of hours, for a check while working; limits on latencies and slopes need the long form on a
machine that does nothing else. The long form of all takes about an hour and a half, of which K9 takes twenty minutes.
"""
import argparse
import pathlib
import sys
import time

import process_gates
import stream_gates  # noqa: F401: its gates register themselves
from soak_gate import GATES, Report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--contamination-test")
    options = parser.parse_args()
    process_gates.K13.binary = options.contamination_test
    program = str(pathlib.Path(options.program).resolve())
    wanted = options.only.split(",") if options.only else GATES
    names = [name for name in sorted(GATES, key=lambda name: int(name[1:])) if name in wanted]
    failed = []
    for name in names:
        report, start = Report(name), time.monotonic()
        try:
            GATES[name](program, options.short, report)
        except Exception as error:  # a gate that cannot be measured is broken
            report.line("ended early", f"{type(error).__name__}: {error}", "no error", False)
        if not report.ok:
            failed.append(name)
        print(f"{name:4} {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(names) - len(failed)} of {len(names)} gates held" + (f"; broken: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
