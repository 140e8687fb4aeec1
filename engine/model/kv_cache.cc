#include "engine/model/kv_cache.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace flashquant {

int64_t KvCache::BlockBytes(const PagedKvGeometry& geometry, DType kv_dtype) {
  return geometry.num_layers * 2 * geometry.BlockElements() * DTypeBytes(kv_dtype);
}

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::Create(Backend* backend,
                                                         const PagedKvGeometry& geometry) {
  std::unique_ptr<KvCache> cache(new KvCache(geometry));
  const int64_t layer_bytes =
      geometry.num_blocks * geometry.BlockElements() * DTypeBytes(backend->info().kv_dtype);
  for (int32_t layer = 0; layer < geometry.num_layers; ++layer) {
    FQ_ASSIGN_OR_RETURN(DeviceBuffer k, backend->Allocate(layer_bytes));
    FQ_ASSIGN_OR_RETURN(DeviceBuffer v, backend->Allocate(layer_bytes));
    cache->layers_.push_back({std::move(k), std::move(v)});
  }
  return cache;
}

}  // namespace flashquant
