// Learned position embeddings, added to the rows of the token embedding.
#include "kernels/cpu/cpu_kernels.h"

namespace flashquant {

void AddPositionsCpu(const AddPositionsParams& params, ThreadPool& pool) {
  const int64_t hidden = params.hidden;
  ForRows(pool, params.num_tokens, hidden, [&](int64_t token) {
    const float* position = params.table + params.positions[token] * hidden;
    float* x = static_cast<float*>(params.x) + token * hidden;
    for (int64_t i = 0; i < hidden; ++i) x[i] += position[i];
  });
}

}  // namespace flashquant
