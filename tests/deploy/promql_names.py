"""Which metrics and labels a PromQL expression names, and whether they exist.

Not a parser: promtool says whether an expression is well formed. This only finds the names in one that is, and holds
them against the metrics of README.md's table (name without prefix, type, labels and their values, if listed).
"""
import re
from dataclasses import dataclass, field

AGGREGATORS = set("sum min max avg count stddev stdvar topk bottomk quantile count_values group".split())
GROUPINGS = set("by without on ignoring group_left group_right".split())
OPERATORS = set("and or unless bool offset atan2 inf nan".split())
# Metrics that do not come from the server, with their labels.
BUILT_IN = {"up": set(), "ALERTS": {"alertname", "alertstate", "severity"}}
TARGET_LABELS = {"job", "instance"}
# Exported only by a server with a GPU, the first three by one with NVML.
ONLY_WITH_GPU = {"device_utilization_ratio", "device_temperature_celsius", "device_energy_joules_total",
                 "device_memory_bytes", "device_errors_total", "device_power_watts", "device_clock_hertz"}
# Families that describe the process or the device and so have no label model.
WITHOUT_MODEL = ONLY_WITH_GPU | {"auth_failures_total", "build_info", "grpc_callback_delay_seconds",
                                 "log_messages_total", "tls_handshake_failures_total"}

TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<number>\.?[0-9][0-9a-zA-Z.]*)"""
    r"""|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<symbol>=~|!~|!=|==|<=|>=|.)""", re.S)


@dataclass
class Metric:
    """labels: label to its values, or to None where README lists none."""
    type: str
    labels: dict = field(default_factory=dict)


@dataclass
class Names:
    """selectors: (metric, [(label, operator, value)]); grouped: labels in by (), on () and the like."""
    selectors: list = field(default_factory=list)
    grouped: set = field(default_factory=set)


def read_metrics(readme):
    """Full series name to Metric, from the table of README's section "Metrics"; histograms give their three names."""
    section = readme.split("\n## Metrics\n", 1)[1].split("\n## ", 1)[0]
    metrics = {}
    for short, kind, labels in re.findall(r"^\| `([a-z_]+)` \| (\w+) \| ([^|]*)\|", section, re.M):
        known = {}
        for part in filter(None, (label.strip() for label in labels.split(";"))):
            label, _, values = part.partition(":")
            known[label] = {value.strip() for value in values.split(",")} if values else None
        if not short.startswith("process_") and short not in WITHOUT_MODEL:
            known["model"] = None
        name = short if short.startswith("process_") else f"flashquant_{short}"
        if kind == "histogram":
            metrics[f"{name}_bucket"] = Metric(kind, {**known, "le": None})
            metrics[f"{name}_sum"] = metrics[f"{name}_count"] = Metric(kind, known)
        else:
            metrics[name] = Metric(kind, known)
    return metrics


def needs_gpu(expression):
    """Whether it has an answer only where a server with a GPU is scraped."""
    return any(metric.removeprefix("flashquant_") in ONLY_WITH_GPU for metric, _ in find_names(expression).selectors)


def find_names(expression):
    tokens = [(m.lastgroup, m.group()) for m in TOKEN.finditer(expression) if m.lastgroup]
    names = Names()
    i = 0
    while i < len(tokens):
        kind, text = tokens[i]
        following = tokens[i + 1][1] if i + 1 < len(tokens) else ""
        i += 1
        if text == "{":
            raise ValueError("a selector without a metric")
        if kind != "name" or text.lower() in OPERATORS | AGGREGATORS:
            continue
        if text in GROUPINGS:
            if following == "(":
                end = tokens.index(("symbol", ")"), i)
                names.grouped |= {word for what, word in tokens[i:end] if what == "name"}
                i = end + 1
        elif following == "{":
            end = tokens.index(("symbol", "}"), i)
            inside = [word for _, word in tokens[i + 1:end] if word != ","]
            names.selectors.append((text, [(inside[k], inside[k + 1], inside[k + 2][1:-1])
                                           for k in range(0, len(inside), 3)]))
            i = end + 1
        elif following != "(":
            names.selectors.append((text, []))
    return names


def labels_of(metric, metrics, recorded):
    """Label to values of an exported, built-in or recorded metric; None if there is no such metric."""
    if metric in metrics:
        return {**metrics[metric].labels, **dict.fromkeys(TARGET_LABELS)}
    if metric in BUILT_IN:
        return dict.fromkeys(BUILT_IN[metric] | TARGET_LABELS)
    if metric in recorded:
        labels = {}
        for used, _ in find_names(recorded[metric]).selectors:
            labels.update(labels_of(used, metrics, recorded) or {})
        return labels
    return None


def problems(expression, metrics, recorded):
    """What the expression names that is not there. `recorded`: name of each recording rule to its expression."""
    found = []
    reachable = set()
    names = find_names(expression)
    for metric, matchers in names.selectors:
        labels = labels_of(metric, metrics, recorded)
        if labels is None:
            found.append(f"{metric} is not exported")
            continue
        reachable |= set(labels)
        for label, operator, value in matchers:
            if label not in labels:
                found.append(f"{metric} has no label {label}")
            elif labels[label] is not None:
                values = value.split("|") if "~" in operator else [value]
                found += [f"{metric}: {label} is never {v}" for v in values if v not in labels[label]]
    found += [f"no metric here has the label {label}" for label in sorted(names.grouped - reachable)]
    if not names.selectors:
        found.append("no metric in it")
    return found
