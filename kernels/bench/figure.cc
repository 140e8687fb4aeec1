// See figure.h.
#include "kernels/bench/figure.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "fmt/format.h"

namespace flashquant::bench {
namespace {

constexpr double kWidth = 760;
constexpr double kHeight = 420;
constexpr double kLeft = 70;
constexpr double kRight = 230;  // the legend
constexpr double kTop = 50;
constexpr double kBottom = 60;
constexpr double kBottomOfLongLabels = 130;
constexpr size_t kLongLabel = 9;  // from here on labels are slanted
constexpr std::array<const char*, 6> kColors = {"#1b6ca8", "#d1495b", "#66a182",
                                                "#8d6a9f", "#c98f2b", "#4f5d75"};

std::string Number(double value) {
  if (std::isnan(value)) return "-";
  const double size = std::abs(value);
  return size >= 1000 ? fmt::format("{:.0f}", value)
         : size >= 10 ? fmt::format("{:.1f}", value)
         : size >= 1  ? fmt::format("{:.2f}", value)
                      : fmt::format("{:.3g}", value);
}

std::string XmlText(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// 1, 2 or 5 times a power of ten, so that about five steps reach `most`.
double AxisStep(double most) {
  const double rough = most / 5;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

// One figure's part of the drawing, at `top`.
class Chart {
 public:
  Chart(const Figure& figure, double top) : figure_(figure), top_(top) {
    double most = 0;
    for (const FigureSeries& series : figure.series) {
      for (const double value : series.values) {
        if (!std::isnan(value)) most = std::max(most, value);
      }
    }
    for (const std::string& x : figure.x) {
      if (x.size() >= kLongLabel) bottom_ = kBottomOfLongLabels;
    }
    step_ = AxisStep(most > 0 ? most : 1);
    most_ = step_ * std::max(1.0, std::ceil(most / step_));
  }

  std::string Draw() {
    Text(kLeft, top_ + 24, "start", 15, figure_.title);
    DrawAxes();
    for (size_t i = 0; i < figure_.series.size(); ++i) DrawSeries(i);
    return std::move(out_);
  }

 private:
  double X(size_t i) const {
    const double count = static_cast<double>(std::max<size_t>(1, figure_.x.size()));
    return kLeft + (kWidth - kLeft - kRight) * (static_cast<double>(i) + 0.5) / count;
  }
  double Y(double value) const {
    return top_ + kHeight - bottom_ - (kHeight - kTop - bottom_) * value / most_;
  }

  void Text(double x, double y, const char* anchor, int size, const std::string& text) {
    fmt::format_to(
        std::back_inserter(out_),
        "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" font-size=\"{}\">{}</text>\n", x, y,
        anchor, size, XmlText(text));
  }
  void Line(double x1, double y1, double x2, double y2, const char* color) {
    fmt::format_to(
        std::back_inserter(out_),
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n", x1, y1,
        x2, y2, color);
  }

  void DrawAxes() {
    for (double value = 0; value <= most_ + step_ / 2; value += step_) {
      Line(kLeft, Y(value), kWidth - kRight, Y(value), value == 0 ? "#333333" : "#dddddd");
      Text(kLeft - 8, Y(value) + 4, "end", 12, Number(value));
    }
    for (size_t i = 0; i < figure_.x.size(); ++i) {
      const double y = top_ + kHeight - bottom_ + 18;
      if (bottom_ == kBottom) {
        Text(X(i), y, "middle", 12, figure_.x[i]);
      } else {
        out_ += fmt::format("<g transform=\"rotate(-35 {:.1f} {:.1f})\">", X(i), y);
        Text(X(i), y, "end", 11, figure_.x[i]);
        out_ += "</g>\n";
      }
    }
    Text((kLeft + kWidth - kRight) / 2, top_ + kHeight - 16, "middle", 13, figure_.x_label);
    Text(kLeft, top_ + kTop - 8, "start", 12, figure_.y_label);
  }

  // A line that leaves out missing values, with a mark at each one it has.
  void DrawSeries(size_t index) {
    const FigureSeries& series = figure_.series[index];
    const char* const color = kColors[index % kColors.size()];
    std::string points;
    std::string marks;
    for (size_t i = 0; i < std::min(series.values.size(), figure_.x.size()); ++i) {
      if (std::isnan(series.values[i])) continue;
      const double y = Y(series.values[i]);
      points += fmt::format("{:.1f},{:.1f} ", X(i), y);
      marks += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"/>\n", X(i), y,
                           color);
    }
    out_ +=
        fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n{}",
                    points, color, marks);
    const double y = top_ + kTop + 22 * static_cast<double>(index);
    Line(kWidth - kRight + 14, y, kWidth - kRight + 38, y, color);
    Text(kWidth - kRight + 44, y + 4, "start", 12, series.name);
  }

  const Figure& figure_;
  const double top_;
  double step_ = 1;
  double most_ = 1;
  double bottom_ = kBottom;
  std::string out_;
};

}  // namespace

std::string CsvField(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"') out += '"';
    out += c;
  }
  return out + '"';
}

std::string FigureTable(const Figure& figure) {
  size_t first = figure.x_label.size();
  for (const std::string& x : figure.x) first = std::max(first, x.size());
  std::string out =
      fmt::format("{} ({})\n{:<{}}", figure.title, figure.y_label, figure.x_label, first);
  for (const FigureSeries& series : figure.series) out += "  " + series.name;
  out += '\n';
  for (size_t i = 0; i < figure.x.size(); ++i) {
    out += fmt::format("{:<{}}", figure.x[i], first);
    for (const FigureSeries& series : figure.series) {
      const double value = i < series.values.size() ? series.values[i] : std::nan("");
      out += fmt::format("  {:>{}}", Number(value), series.name.size());
    }
    out += '\n';
  }
  for (const std::string& note : figure.notes) out += note + '\n';
  return out;
}

std::string FigureCsv(std::span<const Figure> figures) {
  std::string out = "figure,x,series,value\n";
  for (const Figure& figure : figures) {
    for (size_t i = 0; i < figure.x.size(); ++i) {
      for (const FigureSeries& series : figure.series) {
        if (i >= series.values.size() || std::isnan(series.values[i])) continue;
        out += fmt::format("{},{},{},{:.6g}\n", CsvField(figure.title), CsvField(figure.x[i]),
                           CsvField(series.name), series.values[i]);
      }
    }
  }
  return out;
}

std::string FigureSvg(std::span<const Figure> figures) {
  const double height = kHeight * static_cast<double>(figures.size());
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      kWidth, height);
  for (size_t i = 0; i < figures.size(); ++i) {
    out += Chart(figures[i], kHeight * static_cast<double>(i)).Draw();
  }
  return out + "</svg>\n";
}

}  // namespace flashquant::bench
