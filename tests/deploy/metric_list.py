"""A scrape against the list of what is to be exported, wanted_metrics.yaml beside this.

README's table says what is there; this list was written down from the design and says what should be. Where they differ,
the list has `without` (label values that are not exported) or `later: true` (a family that is not), with the reason; a
reason that no longer holds is a problem too.
"""
import math
import pathlib

import yaml

LIST = pathlib.Path(__file__).with_name("wanted_metrics.yaml")


def read_list():
    return yaml.safe_load(LIST.read_text(encoding="utf-8"))


def full_name(name):
    return name if name.startswith("process_") else f"flashquant_{name}"


def label_problems(wanted, found):
    """`found`: the labels of each series of one family, without le."""
    expected = dict(wanted.get("labels", {}))
    if not wanted.get("process"):
        expected["model"] = "any"
    for labels in found:
        if set(labels) != set(expected):
            return [f"labels {sorted(labels)}, wanted {sorted(expected)}"]
    problems = []
    for label, values in expected.items():
        seen = {labels[label] for labels in found}
        if values != "any":
            left_out = set(wanted.get("without", {}).get(label, []))
            if seen != set(values) - left_out:
                problems.append(f"{label} is {sorted(seen)}, wanted {sorted(set(values) - left_out)}")
        elif "" in seen:
            problems.append(f"{label} is empty")
    return problems


def family_problems(name, wanted, bounds, types, series):
    """`bounds`: those of the buckets, as in the list."""
    full = full_name(name)
    if full not in types:
        return [] if wanted.get("gpu") or wanted.get("later") else ["not exported"]
    if wanted.get("later"):
        return ["exported, but listed for later"]
    problems = []
    if types[full] != wanted["type"]:
        problems.append(f"a {types[full]}, wanted a {wanted['type']}")
    names = {f"{full}_sum", f"{full}_count"} if wanted["type"] == "histogram" else {full}
    problems += label_problems(wanted, [labels for found, labels in series if found in names])
    if wanted["type"] == "histogram":
        found = {float(labels["le"]) for series_name, labels in series if series_name == f"{full}_bucket"}
        if found != {*map(float, bounds), math.inf}:
            problems.append(f"bounds {sorted(found)}, wanted {bounds}")
    return problems


def list_problems(wanted, types, series):
    """What differs: `types` and `series` as live_metrics_test.parse_exposition gives them."""
    problems = []
    for name, entry in wanted["metrics"].items():
        if ("later" in entry or "without" in entry) and not entry.get("why"):
            problems.append(f"{name}: a difference without a reason")
        found = family_problems(name, entry, wanted["buckets"].get(entry.get("buckets")), types, series)
        problems += [f"{name}: {problem}" for problem in found]
    return problems + [f"{full}: exported, but not in the list"
                       for full in sorted(set(types) - {full_name(name) for name in wanted["metrics"]})]
