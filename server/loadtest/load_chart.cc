// The chart of a load test as SVG: four lines over the rate, latency on a log scale.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "fmt/format.h"
#include "server/loadtest/load_report.h"

namespace flashquant {
namespace {

constexpr double kWidth = 720, kHeight = 420;
constexpr double kLeft = 70, kRight = 170, kTop = 30, kBottom = 50;

struct Line {
  const char* name;
  const char* colour;
  const char* dash;
  std::function<double(const LoadReport&)> value;  // seconds
};

const std::array<Line, 4>& Lines() {
  static const auto* const lines = new std::array<Line, 4>{
      Line{"first token p50", "#1f77b4", "4 3",
           [](const auto& run) { return run.first_token.p50; }},
      Line{"first token p99", "#1f77b4", "none",
           [](const auto& run) { return run.first_token.p99; }},
      Line{"gap p50", "#d62728", "4 3", [](const auto& run) { return run.gap.p50; }},
      Line{"gap p99", "#d62728", "none", [](const auto& run) { return run.gap.p99; }}};
  return *lines;
}

double RateOf(const LoadReport& run) {
  return run.offered_rate > 0 ? run.offered_rate : run.Rate();
}

struct Axes {
  double max_rate = 1;
  int low_decade = -3;  // of milliseconds
  int high_decade = 3;

  double X(double rate) const { return kLeft + rate / max_rate * (kWidth - kLeft - kRight); }
  double Y(double ms) const {
    const double share = (std::log10(ms) - low_decade) / (high_decade - low_decade);
    return kHeight - kBottom - share * (kHeight - kTop - kBottom);
  }
};

Axes MakeAxes(const std::vector<LoadReport>& runs) {
  Axes axes;
  double low = 1e9;
  double high = 1e-3;
  double rate = 0;
  for (const LoadReport& run : runs) {
    rate = std::max(rate, RateOf(run));
    for (const Line& line : Lines()) {
      const double ms = line.value(run) * 1e3;
      if (ms <= 0) continue;
      low = std::min(low, ms);
      high = std::max(high, ms);
    }
  }
  if (rate > 0) axes.max_rate = rate * 1.05;
  axes.low_decade = static_cast<int>(std::floor(std::log10(std::min(low, high))));
  axes.high_decade = std::max(axes.low_decade + 1, static_cast<int>(std::ceil(std::log10(high))));
  return axes;
}

std::string Grid(const Axes& axes) {
  std::string svg;
  for (int decade = axes.low_decade; decade <= axes.high_decade; ++decade) {
    const double y = axes.Y(std::pow(10, decade));
    svg += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>\n"
        "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{:g} ms</text>\n",
        kLeft, y, kWidth - kRight, y, kLeft - 6, y + 4, std::pow(10, decade));
  }
  for (int i = 0; i <= 4; ++i) {
    const double rate = axes.max_rate * i / 4;
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{:.3g}</text>\n",
                       axes.X(rate), kHeight - kBottom + 18, rate);
  }
  svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">requests/s</text>\n",
                     (kLeft + kWidth - kRight) / 2, kHeight - 10);
  return svg;
}

std::string Curve(const Line& line, const std::vector<LoadReport>& runs, const Axes& axes) {
  std::string points;
  std::string dots;
  for (const LoadReport& run : runs) {
    const double ms = line.value(run) * 1e3;
    if (ms <= 0) continue;
    const double x = axes.X(RateOf(run));
    points += fmt::format("{:.1f},{:.1f} ", x, axes.Y(ms));
    dots += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x,
                        axes.Y(ms), line.colour);
  }
  return fmt::format(
             "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" "
             "stroke-dasharray=\"{}\"/>\n",
             points, line.colour, line.dash) +
         dots;
}

}  // namespace

std::string ReportsSvg(const std::vector<LoadReport>& reports) {
  std::vector<LoadReport> runs = reports;
  std::ranges::sort(runs, {}, RateOf);
  const Axes axes = MakeAxes(runs);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
      "viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
      kWidth, kHeight);
  svg += Grid(axes);
  double y = kTop + 10;
  for (const Line& line : Lines()) {
    svg += Curve(line, runs, axes);
    svg += fmt::format(
        "<line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{2:.1f}\" y2=\"{1:.1f}\" stroke=\"{3}\" "
        "stroke-dasharray=\"{4}\"/>\n<text x=\"{5:.1f}\" y=\"{6:.1f}\">{7}</text>\n",
        kWidth - kRight + 12, y, kWidth - kRight + 40, line.colour, line.dash, kWidth - kRight + 46,
        y + 4, line.name);
    y += 20;
  }
  return svg + "</svg>\n";
}

}  // namespace flashquant
