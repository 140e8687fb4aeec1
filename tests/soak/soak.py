"""Load and soak gates K1 to K15: each prints its figures beside its limits and fails when one is broken.

    tests/soak/run.sh PROGRAM [--short] [--only K1,K8] [--contamination-test BINARY]

--short: minutes instead of hours, for a check while working; limits on latencies and slopes need the long form on a
machine that does nothing else: what other programs took of it meanwhile stands behind each gate's time. The long form
of all takes about an hour and a half, of which K9 takes twenty minutes.
"""
import argparse
import os
import pathlib
import resource
import sys
import time

import process_gates
import stream_gates  # noqa: F401: its gates register themselves
from soak_gate import GATES, Report


class OtherPrograms:
    """CPU time that neither this program nor what it has started and ended took, since the beginning."""

    def __init__(self):
        self.begin, self.begin_time = self._seconds(), time.monotonic()

    def cores(self):
        """In the mean. Not below zero: the kernel counts its ticks a little late."""
        return max(0.0, (self._seconds() - self.begin) / (time.monotonic() - self.begin_time))

    @staticmethod
    def _seconds():
        with open("/proc/stat") as stat:
            user, nice, system, _, _, irq, softirq, steal = map(int, stat.readline().split()[1:9])
        all_programs = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return all_programs - sum(usage.ru_utime + usage.ru_stime for usage in own)


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
        report, start, others = Report(name), time.monotonic(), OtherPrograms()
        try:
            GATES[name](program, options.short, report)
        except Exception as error:  # a gate that cannot be measured is broken
            report.line("ended early", f"{type(error).__name__}: {error}", "no error", False)
        if not report.ok:
            failed.append(name)
        print(f"{name:4} {time.monotonic() - start:.0f} s; other programs took {others.cores():.2f} cores", flush=True)
    print(f"{len(names) - len(failed)} of {len(names)} gates held" + (f"; broken: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
