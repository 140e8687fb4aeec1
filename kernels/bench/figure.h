// A figure as data, and its three forms: a text table, CSV and a line chart in SVG.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace flashquant::bench {

struct FigureSeries {
  std::string name;
  std::vector<double> values;  // by x; NaN: missing
};

struct Figure {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<std::string> x;
  std::vector<FigureSeries> series;
  std::vector<std::string> notes;
};

// Title, a row for each x with a column for each series, notes.
std::string FigureTable(const Figure& figure);

// "figure,x,series,value" lines under a header; missing values are left out.
std::string FigureCsv(std::span<const Figure> figures);

// The figures below each other; y axes begin at 0, x values are spaced evenly.
std::string FigureSvg(std::span<const Figure> figures);

// A field of a CSV line: in quotes when it needs them.
std::string CsvField(const std::string& text);

}  // namespace flashquant::bench
