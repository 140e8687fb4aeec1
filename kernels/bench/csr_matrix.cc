// See csr_matrix.h.
#include "kernels/bench/csr_matrix.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace flashquant::bench {
namespace {

// Calls visit(n, k, value) for every slot that is not null.
template <typename Visit>
void ForEachSlot(const cuda::TileCooPointers& outliers, int64_t k, int64_t n, Visit&& visit) {
  if (outliers.tile_indptr == nullptr) return;
  const int64_t tiles_k = (k + outliers.tile_k - 1) / outliers.tile_k;
  const int64_t tiles = (n + outliers.tile_n - 1) / outliers.tile_n * tiles_k;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (uint32_t r = outliers.tile_indptr[tile]; r < outliers.tile_indptr[tile + 1]; ++r) {
      const uint8_t* record = outliers.records + static_cast<size_t>(r) * 16;
      for (int s = 0; s < 4; ++s) {
        uint16_t value = 0;
        std::memcpy(&value, record + 8 + 2 * s, 2);
        if (value == 0) continue;
        visit(tile / tiles_k * outliers.tile_n + record[4 + s],
              tile % tiles_k * outliers.tile_k + record[s], value);
      }
    }
  }
}

void SortRow(CsrMatrix& csr, int64_t row, std::vector<std::pair<int32_t, uint16_t>>& scratch) {
  const auto begin = static_cast<size_t>(csr.row_begin[static_cast<size_t>(row)]);
  const auto end = static_cast<size_t>(csr.row_begin[static_cast<size_t>(row) + 1]);
  scratch.clear();
  for (size_t i = begin; i < end; ++i) scratch.emplace_back(csr.column[i], csr.value[i]);
  std::sort(scratch.begin(), scratch.end());
  for (size_t i = begin; i < end; ++i) {
    csr.column[i] = scratch[i - begin].first;
    csr.value[i] = scratch[i - begin].second;
  }
}

}  // namespace

CsrMatrix ToCsr(const cuda::TileCooPointers& outliers, int64_t k, int64_t n) {
  CsrMatrix csr;
  csr.rows = n;
  csr.columns = k;
  csr.row_begin.resize(static_cast<size_t>(n) + 1);
  ForEachSlot(outliers, k, n, [&](int64_t row, int64_t /*column*/, uint16_t /*value*/) {
    ++csr.row_begin[static_cast<size_t>(row) + 1];
  });
  std::partial_sum(csr.row_begin.begin(), csr.row_begin.end(), csr.row_begin.begin());
  csr.column.resize(static_cast<size_t>(csr.row_begin.back()));
  csr.value.resize(csr.column.size());
  std::vector<int32_t> next(csr.row_begin.begin(), csr.row_begin.end() - 1);
  ForEachSlot(outliers, k, n, [&](int64_t row, int64_t column, uint16_t value) {
    const auto at = static_cast<size_t>(next[static_cast<size_t>(row)]++);
    csr.column[at] = static_cast<int32_t>(column);
    csr.value[at] = value;
  });
  std::vector<std::pair<int32_t, uint16_t>> scratch;
  for (int64_t row = 0; row < n; ++row) SortRow(csr, row, scratch);
  return csr;
}

}  // namespace flashquant::bench
