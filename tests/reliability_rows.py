#!/usr/bin/env python3
"""The matrix of reliability rows: which test stands for each row, and with which result.

usage: tests/reliability_rows.py [--junit FILE] [ROOT]

Rows stand in tests/reliability_rows.txt. A test claims rows by a comment with their ids ("// R15, R16")
above it or inside it. Prints one line a row; with the JUnit file of `ctest --output-junit` also whether
its tests passed. Exit code 1 when a row has neither a test nor a reason why not, and when a row's test failed.
"""
import argparse
import pathlib
import re
import sys
import xml.etree.ElementTree

ROW = re.compile(r"\b([RTMCNSLGO])([0-9]{1,2})(?:-\1([0-9]{1,2}))?\b")
TEST = re.compile(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)")
COMMENT = re.compile(r"(?://|#)(.*)")
SUFFIXES = {".cc", ".cu", ".py", ".sh"}


def read_rows(path):
    """id -> (title, reason or None)."""
    rows = {}
    for line in path.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        row, title, *reason = line.split("\t")
        if row in rows:
            sys.exit(f"{path}: {row} is there twice")
        rows[row] = (title, reason[0] if reason else None)
    return rows


def ids_of(comment):
    for kind, first, last in ROW.findall(comment):
        for number in range(int(first), int(last or first) + 1):
            yield f"{kind}{number}"


def claims_of(path, root):
    """Pairs of row id and the name of the test that claims it."""
    lines = path.read_text(errors="replace").splitlines()
    whole_file = str(path.relative_to(root))
    current = whole_file
    waiting = []  # of a comment outside any test: it belongs to the next one
    inside = False
    for line in lines:
        test = TEST.match(line)
        if test:
            current = f"{test.group(1)}.{test.group(2)}"
            yield from ((row, current) for row in waiting)
            waiting = []
            inside = True
        comment = COMMENT.search(line)
        if comment:
            found = list(ids_of(comment.group(1)))
            if inside:
                yield from ((row, current) for row in found)
            else:
                waiting += found
        if line.startswith("}"):
            inside = False
    yield from ((row, whole_file) for row in waiting)


def read_results(path):
    """Test name -> True when it passed, False when it failed; skipped ones are left out."""
    results = {}
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        status = case.get("status")
        if status in ("run", "fail"):
            results[case.get("name")] = status == "run"
    return results


def verdict(tests, results):
    """ok, FAILED or not run, of a row's tests; parametrized tests have names around theirs."""
    seen = [
        passed
        for name, passed in results.items()
        if any(test == name or re.search(rf"(^|/){re.escape(test)}(/|$)", name) for test in tests)
    ]
    if not seen:
        return "not run"
    return "ok" if all(seen) else "FAILED"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--junit")
    parser.add_argument("root", nargs="?", default=".")
    arguments = parser.parse_args()
    root = pathlib.Path(arguments.root).resolve()
    rows = read_rows(root / "tests" / "reliability_rows.txt")
    results = read_results(arguments.junit) if arguments.junit else None

    tests = {row: set() for row in rows}
    problems = []
    for path in sorted((root / "tests").rglob("*")):
        is_test = path.suffix in SUFFIXES and re.search(r"_(test|fuzz)$", path.stem)
        if not is_test or "fixtures" in path.parts:
            continue
        for row, test in claims_of(path, root):
            if row in tests:
                tests[row].add(test)
    for row, (title, reason) in rows.items():
        if tests[row] and reason:
            print(f"note: {row} has a test now, its reason in reliability_rows.txt can go")
        if not tests[row] and not reason:
            problems.append(f"{row}: no test claims it and no reason says why: {title}")
        state = ", ".join(sorted(tests[row])) or f"not tested: {reason}"
        if results is not None and tests[row]:
            state = f"{verdict(tests[row], results)}: {state}"
            if state.startswith("FAILED"):
                problems.append(f"{row}: {state}")
        print(f"{row:4}{title}\n    {state}")
    covered = sum(1 for row in rows if tests[row])
    print(f"{len(rows)} rows, {covered} with a test, {len(rows) - covered} with a reason why not")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
