"""Pictures of the dashboards without Grafana: draw_dashboards.py PROGRAM FOLDER, from the repository root.

Starts the program and a Prometheus as live_metrics_test.py does, puts it under that test's load for a while, asks for
each panel's expressions over that time and draws them to FOLDER/NAME.png. Needs Debian's packages prometheus,
python3-yaml and python3-matplotlib. For the reader only: Grafana's look differs, what the panels show does not.
"""
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.parse

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  the backend must be chosen before

import live_metrics_test  # noqa: E402
import monitoring_test  # noqa: E402

LOAD_SECONDS = 60
COLUMNS = 3
UNITS = {"none": "", "percentunit": "share", "bytes": "bytes", "bool_yes_no": "1 = yes"}


def query_range(served, expression, start, end):
    """Labels and points of each series of the answer."""
    url = f"{served.prometheus_url}/api/v1/query_range?" + urllib.parse.urlencode(
        {"query": expression, "start": start, "end": end, "step": 1})
    result = json.loads(live_metrics_test.fetch(url))["data"]["result"]
    return [(series["metric"], [(float(t) - start, float(v)) for t, v in series["values"]]) for series in result]


def legend(target, labels):
    text = target["legendFormat"]
    for label, value in labels.items():
        text = text.replace("{{%s}}" % label, "server" if label == "instance" else value)
    return text


def draw_lines(axes, panel, answers):
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    series = [(legend(target, labels), points) for target, answer in answers for labels, points in answer]
    if stacked and series:
        times = sorted({t for _, points in series for t, _ in points})
        heights = [[dict(points).get(t, 0) for t in times] for _, points in series]
        axes.stackplot(times, [[0 if math.isnan(v) else v for v in row] for row in heights],
                       labels=[name for name, _ in series], alpha=0.6)
    else:
        for name, points in series:
            axes.plot([t for t, _ in points], [v for _, v in points], label=name, linewidth=1)
    axes.set_ylim(bottom=0)
    if not series:
        axes.text(0.5, 0.5, "(nothing)", ha="center", va="center", transform=axes.transAxes)
    if any(name for name, _ in series):
        axes.legend(fontsize=5, loc="upper left", ncol=2)


def draw_heatmap(axes, answers):
    """Buckets of an exposition count everything below their bound; a row here is what is between two bounds."""
    rows = sorted(((float(labels["le"]), dict(points)) for labels, points in answers[0][1]), key=lambda row: row[0])
    times = sorted({t for _, points in rows for t in points})
    totals = [[points.get(t, 0) for t in times] for _, points in rows]
    between = [[now - below for now, below in zip(row, under)]
               for row, under in zip(totals, [[0] * len(times), *totals])]
    axes.imshow(between, aspect="auto", origin="lower", cmap="Blues", extent=(times[0], times[-1], 0, len(rows)))
    axes.set_yticks([i + 0.5 for i in range(len(rows))][::3], [f"{bound:g}" for bound, _ in rows][::3])


def draw_words(axes, panel, answers):
    """The last value of a stat, the rows of a table."""
    axes.axis("off")
    lines = []
    several = sum(len(answer) for _, answer in answers) > 1
    for target, answer in answers:
        for labels, points in answer:
            if panel["type"] == "stat":
                unit = panel["fieldConfig"]["defaults"]["unit"]
                name = f"{legend(target, labels)}: " if several else ""
                lines.append(f"{name}{points[-1][1]:.4g} {UNITS.get(unit, unit)}")
            else:
                lines += [f"{label}: {value}" for label, value in labels.items()
                          if label not in ("__name__", "job", "instance")]
    size = 7 if panel["type"] != "stat" else 9 if several else 16
    axes.text(0.5, 0.5, "\n".join(lines) or "(nothing)", ha="center", va="center", fontsize=size)


def draw(served, path, folder, start, end):
    dashboard = json.loads(monitoring_test.read(path))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    figure, grid = pyplot.subplots(math.ceil(len(panels) / COLUMNS), COLUMNS, squeeze=False,
                                   figsize=(12, 1.9 * math.ceil(len(panels) / COLUMNS)))
    for axes in grid.flat[len(panels):]:
        axes.axis("off")
    for axes, panel in zip(grid.flat, panels):
        answers = [(target, query_range(
            served, monitoring_test.substitute(target["expr"].replace("$__rate_interval", "10s")), start, end))
            for target in panel["targets"]]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axes.set_title(f"{panel['title']} [{UNITS.get(unit, unit)}]".replace(" []", ""), fontsize=8)
        axes.tick_params(labelsize=6)
        if panel["type"] == "timeseries":
            draw_lines(axes, panel, answers)
        elif panel["type"] == "heatmap":
            draw_heatmap(axes, answers)
        else:
            draw_words(axes, panel, answers)
    figure.suptitle(f"{dashboard['title']} ({end - start:.0f} s of test load on the demo model; x: seconds)", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(pathlib.Path(folder, pathlib.Path(path).stem + ".png"), dpi=80)
    pyplot.close(figure)


def main(program, folder):
    served = live_metrics_test.Served()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            served.launch(program, scratch)
            live_metrics_test.wait_until(
                lambda: subprocess.run([program, "health", "--target", served.target], capture_output=True,
                                       check=False).returncode == 0, "the server serves", served.log)
            start = time.time()
            while time.time() - start < LOAD_SECONDS:
                served.load()
            for path in monitoring_test.DASHBOARDS:
                draw(served, path, folder, start, time.time())
        finally:
            served.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
