#include "kernels/cuda/backend/fused_linear.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"
#include "kernels/cuda/backend/join_packed.h"
#include "kernels/cuda/backend/unpack_weight.h"
#include "kernels/cuda/linear_w4a16/pack.h"

namespace flashquant::cuda {
namespace {

constexpr int64_t kSizeMultiple = 8;
constexpr int32_t kMaxStrips = 65535;  // blocks along y in the grid of LaunchUnpackWeight
constexpr unsigned kMaxPackThreads = 16;

bool Takes(const LinearPart& part) {
  return part.int4 != nullptr && part.bias == nullptr && part.n() % kSizeMultiple == 0 &&
         part.k() % kSizeMultiple == 0 &&
         (part.outliers == nullptr ||
          part.outliers->geometry().value_type == TileCooValueType::kBFloat16);
}

PackedLinear PackPart(const LinearPart& part) {
  const Int4Weight& weight = *part.int4;
  const Int4Arrays arrays = {
      .n = weight.n,
      .k = weight.k,
      .n_padded = weight.n_padded,
      .k_padded = weight.k_padded,
      .group_size = weight.group_size,
      .qweight = weight.qweight.data(),
      .scales = reinterpret_cast<const uint16_t*>(weight.scales.data()),
      .zeros = weight.symmetric ? nullptr : weight.zeros.data(),
  };
  TileCooPointers outliers;
  if (part.outliers != nullptr) {
    outliers.tile_k = part.outliers->geometry().tile_k;
    outliers.tile_n = part.outliers->geometry().tile_n;
    outliers.tile_indptr = part.outliers->arrays().tile_indptr.data();
    outliers.records = reinterpret_cast<const uint8_t*>(part.outliers->arrays().records.data());
  }
  const unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxPackThreads);
  return PackLinear(arrays, outliers, static_cast<int>(threads));
}

// Makes room for num_bytes, zeroed. Only while layers are loaded: nothing is in flight then.
absl::Status Grow(int64_t num_bytes, Backend* backend, DeviceBuffer* buffer) {
  if (num_bytes <= buffer->num_bytes()) return absl::OkStatus();
  *buffer = DeviceBuffer();
  FQ_ASSIGN_OR_RETURN(*buffer, backend->Allocate(num_bytes));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FusedLinear>> FusedLinear::Create(Backend* backend,
                                                                 cudaStream_t stream) {
  std::unique_ptr<FusedLinear> linear(new FusedLinear(backend, stream));
  FQ_RETURN_IF_ERROR(ToStatus(QueryDeviceShape(&linear->device_), "device limits"));
  const UnpackTables tables = MakeUnpackTables();
  FQ_ASSIGN_OR_RETURN(linear->unpack_tables_, backend->Allocate(sizeof(tables)));
  FQ_RETURN_IF_ERROR(backend->CopyToDevice(linear->unpack_tables_.data(), &tables, sizeof(tables)));
  return linear;
}

absl::StatusOr<std::optional<FusedWeight>> FusedLinear::Pack(std::span<const LinearPart> parts) {
  FQ_RETURN_IF_ERROR(CheckLinearParts(parts));
  if (!std::all_of(parts.begin(), parts.end(), Takes)) return std::nullopt;
  std::vector<PackedLinear> packed;
  for (const LinearPart& part : parts) {
    packed.push_back(PackPart(part));
    const size_t last = packed.size() - 1;
    if (last > 0 && !CanFollow(packed[last - 1].layout, packed[last].layout)) return std::nullopt;
  }
  const PackedLinear joined = packed.size() == 1 ? std::move(packed[0]) : JoinPacked(packed);
  FusedWeight weight;
  weight.layout = joined.layout;
  weight.passes = ChoosePassPlans(joined.layout, device_);
  if (weight.passes[0].rows_per_pass == 0 || joined.layout.num_strips > kMaxStrips) {
    return std::nullopt;
  }
  FQ_ASSIGN_OR_RETURN(weight.bytes, backend_->Allocate(joined.layout.num_bytes));
  FQ_RETURN_IF_ERROR(
      backend_->CopyToDevice(weight.bytes.data(), joined.bytes.data(), joined.layout.num_bytes));
  FQ_RETURN_IF_ERROR(Reserve(weight));
  return weight;
}

absl::Status FusedLinear::Reserve(const FusedWeight& weight) {
  const PackedLayout& layout = weight.layout;
  for (const PassPlan& pass : weight.passes) {
    const int64_t num_bytes = LinearW4A16WorkspaceBytes(layout, pass.plan, pass.rows_per_pass);
    FQ_RETURN_IF_ERROR(Grow(std::max<int64_t>(num_bytes, 16), backend_, &workspace_));
  }
  const int64_t counters = int64_t{layout.num_strips};
  FQ_RETURN_IF_ERROR(Grow(counters * int64_t{sizeof(uint32_t)}, backend_, &counters_));
  return Grow(int64_t{layout.n} * layout.k * int64_t{sizeof(BFloat16)}, backend_, &matrix_);
}

absl::Status FusedLinear::Run(const FusedWeight& weight, int32_t num_rows, const void* x, void* y) {
  LinearW4A16Params params;
  params.x = x;
  params.y = y;
  params.x_stride = weight.layout.k;
  params.y_stride = weight.layout.n;
  params.m = num_rows;
  params.layout = weight.layout;
  params.weight = weight.bytes.As<uint8_t>();
  const PassPlan& pass = weight.passes[num_rows <= 8 ? 0 : num_rows <= 16 ? 1 : 2];
  params.plan = pass.plan;
  params.rows_per_pass = pass.rows_per_pass;
  params.programmatic_launch = true;
  params.workspace = workspace_.As<float>();
  params.counters = counters_.As<uint32_t>();
  return ToStatus(LaunchLinearW4A16(params, stream_), "linear_w4a16");
}

absl::StatusOr<const void*> FusedLinear::Unpack(const FusedWeight& weight) {
  FQ_RETURN_IF_ERROR(
      ToStatus(LaunchUnpackWeight(weight.layout, weight.bytes.As<uint8_t>(),
                                  unpack_tables_.As<UnpackTables>(), matrix_.data(), stream_),
               "unpacking a weight"));
  return matrix_.data();
}

}  // namespace flashquant::cuda
