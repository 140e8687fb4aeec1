// KvCache: device memory of the K and V blocks of all layers. Which block belongs to whom is the
// scheduler's business (engine/scheduler/block_allocator.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/format/paged_kv.h"

namespace flashquant {

class KvCache final {
 public:
  // RESOURCE_EXHAUSTED when the backend does not have TotalBytes.
  static absl::StatusOr<std::unique_ptr<KvCache>> Create(Backend* backend,
                                                         const PagedKvGeometry& geometry);

  const PagedKvGeometry& geometry() const { return geometry_; }
  void* k(int32_t layer) const { return layers_[static_cast<size_t>(layer)].k.data(); }
  void* v(int32_t layer) const { return layers_[static_cast<size_t>(layer)].v.data(); }

  // Bytes of K and V of one block over all layers.
  static int64_t BlockBytes(const PagedKvGeometry& geometry, DType kv_dtype);

 private:
  struct Layer {
    DeviceBuffer k;
    DeviceBuffer v;
  };
  explicit KvCache(const PagedKvGeometry& geometry) : geometry_(geometry) {}

  const PagedKvGeometry geometry_;
  std::vector<Layer> layers_;
};

}  // namespace flashquant
