// Tests of the forms of a figure: table, CSV and SVG.
#include "kernels/bench/figure.h"

#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashquant::bench {
namespace {

using testing::HasSubstr;
using testing::Not;

Figure Sample() {
  return {"Speed < light",
          "outliers",
          "times",
          {"1%", "3%"},
          {{"fused", {2.5, 2.0}}, {"plain, slow", {std::nan(""), 1200}}},
          {"A note."}};
}

size_t Count(const std::string& text, const std::string& what) {
  size_t count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

TEST(FigureTest, TheTableHasARowForEachXAndADashForMissingValues) {
  EXPECT_EQ(FigureTable(Sample()),
            "Speed < light (times)\n"
            "outliers  fused  plain, slow\n"
            "1%         2.50            -\n"
            "3%         2.00         1200\n"
            "A note.\n");
}

TEST(FigureTest, CsvQuotesFieldsAndLeavesMissingValuesOut) {
  const std::vector<Figure> figures = {Sample()};
  EXPECT_EQ(FigureCsv(figures),
            "figure,x,series,value\n"
            "Speed < light,1%,fused,2.5\n"
            "Speed < light,3%,fused,2\n"
            "Speed < light,3%,\"plain, slow\",1200\n");
  EXPECT_EQ(CsvField("a \"b\""), "\"a \"\"b\"\"\"");
}

TEST(FigureTest, TheDrawingHasALineForEachSeriesAndAMarkForEachValue) {
  const std::vector<Figure> figures = {Sample(), Sample()};
  const std::string svg = FigureSvg(figures);
  EXPECT_THAT(svg, HasSubstr("<svg xmlns="));
  EXPECT_THAT(svg, HasSubstr("Speed &lt; light"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_EQ(Count(svg, "<polyline"), 4u);
  EXPECT_EQ(Count(svg, "<circle"), 6u);
  EXPECT_EQ(Count(svg, "<text"), Count(svg, "</text>"));
}

TEST(FigureTest, LongLabelsAreSlantedSoThatTheyDoNotOverlap) {
  std::vector<Figure> figures = {Sample()};
  EXPECT_THAT(FigureSvg(figures), Not(HasSubstr("rotate")));
  figures[0].x = {"4096x4096 1%", "4096x4096 3%"};
  EXPECT_EQ(Count(FigureSvg(figures), "rotate("), 2u);
}

TEST(FigureTest, AFigureWithoutValuesCanBeDrawn) {
  const std::vector<Figure> figures = {{"Empty", "x", "y", {}, {{"none", {}}}, {}}};
  EXPECT_THAT(FigureSvg(figures), HasSubstr("</svg>"));
  EXPECT_THAT(FigureSvg(figures), Not(HasSubstr("inf")));
}

}  // namespace
}  // namespace flashquant::bench
