// See paper_figures.h.
#include "kernels/bench/paper_figures.h"

#include "kernels/bench/figure_parts.h"

namespace flashquant::bench {

absl::StatusOr<std::vector<Figure>> MakePaperFigure(int number, const FigureOptions& options) {
  switch (number) {
    case 7:
      return SpeedupByDensity(options);
    case 8:
      return SpeedupByRows(options);
    case 9:
      return Preprocessing(options);
    case 10:
      return Storage(options);
    case 11:
      return Ablation(options);
    case 12:
      return Traffic(options);
    default:
      return InvalidArgumentError("figure {}; {} to {}", number, kFirstPaperFigure,
                                  kLastPaperFigure);
  }
}

}  // namespace flashquant::bench
