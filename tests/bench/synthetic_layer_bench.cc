// Relative output error of every method on one synthetic layer with correlated inputs and planted
// heavy tails, beside a straightforward double-precision GPTQ/SpQR (reference_gptq.h), which takes
// minutes at 4096 x 4096. Prints a Markdown table; no timing.
//
// Usage: synthetic_layer_bench [K [N [REFERENCE_ROWS [GROUP]]]], by default 4096 4096 64 and groups
// of 128, 64 and 32. The reference does the first REFERENCE_ROWS rows, and all errors are of those.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/quantize/gptq_quantizer.h"
#include "engine/quantize/hessian_factor.h"
#include "engine/quantize/matrix_quantizer.h"
#include "engine/quantize/parallel_for.h"
#include "tests/engine/quantize/reference_gptq.h"

namespace flashquant {
namespace {

class SyntheticLayerTable final {
 public:
  SyntheticLayerTable(int64_t n, int64_t k, int64_t num_rows)
      : layer_(MakeLayer(n, k, 2 * k, 1)), num_rows_(num_rows) {}

  int Run(const std::vector<int64_t>& groups) {
    const ReferenceGptq reference(layer_, 0.01);
    std::printf(
        "%lld x %lld, errors of %lld rows\n| group | outliers | round to nearest | "
        "reference | ours |\n|---|---|---|---|---|\n",
        static_cast<long long>(layer_.n), static_cast<long long>(layer_.k),
        static_cast<long long>(num_rows_));
    bool holds = true;
    for (const int64_t group : groups) {
      const auto factor =
          FactorHessian(layer_.hessian, {.group_size = group, .num_threads = AvailableThreads()});
      if (!factor.ok()) return 1;
      for (const int64_t per_128 : {0, 4}) {
        MatrixQuantizerOptions options;
        options.group_size = group;
        options.density = static_cast<double>(per_128) / 128;
        options.num_threads = AvailableThreads();
        const double rtn =
            Relative(Dequantize(QuantizeMatrix(layer_.weights, layer_.n, layer_.k, options)));
        const double theirs = Relative(reference.Run(
            static_cast<size_t>(group), static_cast<size_t>(per_128 * group / 128), num_rows_));
        const double ours =
            Relative(Dequantize(QuantizeMatrixGptq(layer_.weights, layer_.n, *factor, options)));
        std::printf("| %lld | %.1f%% | %.5f | %.5f | %.5f |\n", static_cast<long long>(group),
                    100.0 * static_cast<double>(per_128) / 128, rtn, theirs, ours);
        std::fflush(stdout);
        holds = holds && ours <= theirs;
      }
    }
    return holds ? 0 : 1;
  }

 private:
  // Of the first rows of a matrix: root of (e H e) / (w H w).
  template <typename Value>
  double Relative(const std::vector<Value>& quantized) const {
    const size_t count = static_cast<size_t>(num_rows_ * layer_.k);
    const std::vector<float> weights(layer_.weights.begin(),
                                     layer_.weights.begin() + static_cast<std::ptrdiff_t>(count));
    std::vector<float> errors(count);
    for (size_t i = 0; i < count; ++i) {
      errors[i] =
          static_cast<float>(static_cast<double>(weights[i]) - static_cast<double>(quantized[i]));
    }
    return std::sqrt(layer_.hessian.Energy(errors, AvailableThreads()) /
                     layer_.hessian.Energy(weights, AvailableThreads()));
  }

  const SyntheticLayer layer_;
  const int64_t num_rows_;
};

}  // namespace
}  // namespace flashquant

// 0 when ours is nowhere worse than the reference.
int main(int argc, char** argv) {
  const int64_t k = argc > 1 ? std::atoll(argv[1]) : 4096;
  const int64_t n = argc > 2 ? std::atoll(argv[2]) : 4096;
  const int64_t rows = argc > 3 ? std::atoll(argv[3]) : 64;
  std::vector<int64_t> groups = {128, 64, 32};
  if (argc > 4) groups = {std::atoll(argv[4])};
  if (k < 128 || k > 16384 || n < 1 || n > 65536 || rows < 1 || rows > n ||
      (groups[0] != 128 && groups[0] != 64 && groups[0] != 32)) {
    std::fprintf(stderr,
                 "synthetic_layer_bench: K 128..16384, N 1..65536, rows 1..N, group 128, 64, 32\n");
    return 64;
  }
  return flashquant::SyntheticLayerTable(n, k, rows).Run(groups);
}
