// The merging of BPE, whatever decides which pairs merge: the symbols of a piece stay in a linked
// list over arrays, the pairs that can merge in a binary heap of (rank, position). An entry is
// stale when the pair at its position has another rank by now. Each merge removes a symbol and adds
// at most two heap entries: O(n log n), no recursion.
//
// Source: Sennrich et al. 2016 (BPE for translation); lowest rank first, leftmost among equals.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace flashquant {

inline constexpr uint32_t kNoMerge = UINT32_MAX;   // rank of a pair that does not merge
inline constexpr uint32_t kNoSymbol = UINT32_MAX;  // what follows the last one

// Working memory, reused from piece to piece; one per thread.
struct MergeScratch {
  std::vector<int32_t> ids;     // of the symbols; the model's own business
  std::vector<uint32_t> begin;  // likewise: where a symbol starts in the piece
  std::vector<uint32_t> next;   // after MergeSymbols: the symbols that are left, from 0 on
  std::vector<uint32_t> previous, rank;
  std::vector<uint64_t> heap;
};

// Merges `num_symbols` > 0 symbols. rank_of(i): rank of the pair of symbol i and next[i], which is
// a symbol, or kNoMerge. merge(i, rank): that pair becomes symbol i; called before it leaves the
// list.
template <typename RankOf, typename Merge>
void MergeSymbols(uint32_t num_symbols, const RankOf& rank_of, const Merge& merge,
                  MergeScratch* scratch) {
  std::vector<uint32_t>& previous = scratch->previous;
  std::vector<uint32_t>& next = scratch->next;
  std::vector<uint32_t>& rank = scratch->rank;  // of the pair that starts here
  std::vector<uint64_t>& heap = scratch->heap;
  previous.resize(num_symbols);
  next.resize(num_symbols);
  rank.resize(num_symbols);
  heap.clear();
  for (uint32_t i = 0; i < num_symbols; ++i) {
    previous[i] = i == 0 ? kNoSymbol : i - 1;
    next[i] = i + 1 == num_symbols ? kNoSymbol : i + 1;
  }
  for (uint32_t i = 0; i < num_symbols; ++i) {
    rank[i] = next[i] == kNoSymbol ? kNoMerge : rank_of(i);
    if (rank[i] != kNoMerge) heap.push_back((uint64_t{rank[i]} << 32) | i);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto update = [&](uint32_t i) {
    rank[i] = next[i] == kNoSymbol ? kNoMerge : rank_of(i);
    if (rank[i] == kNoMerge) return;
    heap.push_back((uint64_t{rank[i]} << 32) | i);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto top_rank = static_cast<uint32_t>(heap.back() >> 32);
    const auto i = static_cast<uint32_t>(heap.back());
    heap.pop_back();
    if (rank[i] != top_rank) continue;
    merge(i, top_rank);
    const uint32_t removed = next[i];
    rank[removed] = kNoMerge;
    next[i] = next[removed];
    if (next[i] != kNoSymbol) previous[next[i]] = i;
    update(i);
    if (previous[i] != kNoSymbol) update(previous[i]);
  }
}

}  // namespace flashquant
