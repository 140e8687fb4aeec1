// AttentionPlan: cuts the sequences of a step that have more than one query row (prefill) into
// tiles. Those with one need no plan (decode.cuh). Host arithmetic only.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/backend/paged_attention/work.h"
#include "kernels/op_params.h"

namespace flashquant::cuda {

struct AttentionPlan {
  std::vector<AttentionItem> wide;
  int32_t num_single_rows = 0;  // sequences of one query row
};

// `host_batch`: arrays in host memory. `group`: query heads of a KV head. sliding_window 0 = none.
// `wide_rows`: virtual rows of a wide tile.
AttentionPlan MakeAttentionPlan(const AttentionBatch& host_batch, int32_t group,
                                int32_t sliding_window, int32_t wide_rows);

// Whether the decode kernel can have double blocks (DecodeSplit), on a device of `shared_bytes` a
// block: consumer devices' 99 KiB hold them for small heads only. `group`: as above.
bool TakesDoubleBlocks(int head_dim, int group, bool fp8_cache, int shared_bytes);

// A device's shared memory, in bytes.
struct SharedMemoryLimits {
  int of_sm = 0;
  int of_block = 0;
  int reserved = 0;  // of each block, besides its own
};
// What a decode block of `bytes` asks for so that no more than `blocks_per_sm` fit on an SM;
// `bytes` when that is 0.
int PadSharedBytes(int bytes, int blocks_per_sm, const SharedMemoryLimits& limits);

// How the decode kernel shares out `num_units` rows and KV head tiles on a device of `num_sms`. Few
// units are spread over all of it, at first one double block an SM where `double_blocks` says so
// (with clusters only), then up to two blocks; more are not cut up, since starting and joining take
// as long as some hundred keys. Units that do not run all at once are halved where ranks join in a
// cluster, so that the last ones do not run alone for long.
DecodeSplit SplitDecode(int64_t num_units, int num_sms, bool cluster, bool double_blocks);

}  // namespace flashquant::cuda
