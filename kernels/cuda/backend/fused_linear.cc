#include "kernels/cuda/backend/fused_linear.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/canonical_upload.h"
#include "kernels/cuda/backend/cuda_linear_weight.h"
#include "kernels/cuda/backend/cuda_status.h"
#include "kernels/cuda/backend/join_packed.h"
#include "kernels/cuda/backend/op_launchers.h"
#include "kernels/cuda/linear_w4a16/pack.h"
#include "kernels/cuda/linear_w4a16/pack_device.h"

namespace flashquant::cuda {
namespace {

constexpr int64_t kSizeMultiple = 8;
constexpr int32_t kRowsToFloat = 64;   // at once in RunToFloat
constexpr int32_t kMaxStrips = 65535;  // blocks along y in the grid of LaunchUnpackWeight
constexpr unsigned kMaxPackThreads = 16;

bool Takes(const LinearPart& part) {
  return part.int4 != nullptr && part.n() % kSizeMultiple == 0 && part.k() % kSizeMultiple == 0 &&
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

// Makes room for num_bytes, zeroed. What the buffer held is freed first, which waits for what is in
// flight and ends recordings: for loading, and for the first time that something is needed.
absl::Status Grow(int64_t num_bytes, Backend* backend, DeviceBuffer* buffer) {
  if (num_bytes <= buffer->num_bytes()) return absl::OkStatus();
  *buffer = DeviceBuffer();
  FQ_ASSIGN_OR_RETURN(*buffer, backend->Allocate(num_bytes));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FusedLinear>> FusedLinear::Create(Backend* backend,
                                                                 cudaStream_t stream,
                                                                 std::vector<TunedPlan> plans) {
  std::unique_ptr<FusedLinear> linear(new FusedLinear(backend, stream, std::move(plans)));
  FQ_RETURN_IF_ERROR(ToStatus(QueryDeviceShape(&linear->device_), "device limits"));
  linear->device_.tuned_plans = linear->tuned_plans_;
  linear->rows_ = ChooseFusedRows(HasLinearManyRows());
  const UnpackTables tables = MakeUnpackTables();
  FQ_ASSIGN_OR_RETURN(linear->unpack_tables_, backend->Allocate(sizeof(tables)));
  FQ_RETURN_IF_ERROR(backend->CopyToDevice(linear->unpack_tables_.data(), &tables, sizeof(tables)));
  return linear;
}

absl::StatusOr<std::optional<FusedWeight>> FusedLinear::Pack(std::span<const LinearPart> parts) {
  FQ_RETURN_IF_ERROR(CheckLinearParts(parts));
  if (!std::all_of(parts.begin(), parts.end(), Takes)) return std::nullopt;
  FQ_ASSIGN_OR_RETURN(FusedWeight weight,
                      IsCanonicallyJoinable(parts) ? PackOnGpu(parts) : PackOnHost(parts));
  if (weight.bytes.num_bytes() == 0) return std::nullopt;
  FQ_ASSIGN_OR_RETURN(weight.bias, CopyBias(parts, weight.layout.n, backend_));
  FQ_RETURN_IF_ERROR(Reserve(weight));
  return weight;
}

bool FusedLinear::ChoosePlans(FusedWeight* weight) const {
  weight->passes = ChoosePassPlans(weight->layout, device_);
  return weight->passes[0].rows_per_pass != 0 && weight->layout.num_strips <= kMaxStrips;
}

absl::StatusOr<FusedWeight> FusedLinear::PackOnHost(std::span<const LinearPart> parts) const {
  FusedWeight weight;
  std::vector<PackedLinear> packed;
  for (const LinearPart& part : parts) {
    packed.push_back(PackPart(part));
    const size_t last = packed.size() - 1;
    if (last > 0 && !CanFollow(packed[last - 1].layout, packed[last].layout)) return weight;
  }
  const PackedLinear joined = packed.size() == 1 ? std::move(packed[0]) : JoinPacked(packed);
  weight.layout = joined.layout;
  if (!ChoosePlans(&weight)) return weight;
  FQ_ASSIGN_OR_RETURN(weight.bytes, backend_->Allocate(joined.layout.num_bytes));
  FQ_RETURN_IF_ERROR(
      backend_->CopyToDevice(weight.bytes.data(), joined.bytes.data(), joined.layout.num_bytes));
  return weight;
}

absl::StatusOr<FusedWeight> FusedLinear::PackOnGpu(std::span<const LinearPart> parts) {
  FusedWeight weight;
  const CanonicalLayer sizes = PlaceCanonicalLayer(parts, nullptr);
  const int64_t scratch_bytes = DevicePackScratchBytes(sizes.weight);
  FQ_RETURN_IF_ERROR(Grow(sizes.num_bytes + scratch_bytes, backend_, &staging_));
  const CanonicalLayer layer = PlaceCanonicalLayer(parts, staging_.As<uint8_t>());
  FQ_RETURN_IF_ERROR(UploadCanonicalLayer(parts, layer, backend_));
  uint8_t* const scratch = staging_.As<uint8_t>() + layer.num_bytes;
  FQ_RETURN_IF_ERROR(ToStatus(
      LayOutOnDevice(layer.weight, layer.outliers, scratch, stream_, &weight.layout), "packing"));
  if (!ChoosePlans(&weight)) return weight;
  FQ_ASSIGN_OR_RETURN(weight.bytes, backend_->Allocate(weight.layout.num_bytes));
  FQ_RETURN_IF_ERROR(ToStatus(PackOnDevice(layer.weight, layer.outliers, weight.layout, scratch,
                                           weight.bytes.As<uint8_t>(), stream_),
                              "packing"));
  return weight;
}

absl::Status FusedLinear::Reserve(const FusedWeight& weight) {
  const PackedLayout& layout = weight.layout;
  for (const PassPlan& pass : weight.passes) {
    const int64_t num_bytes = LinearW4A16WorkspaceBytes(layout, pass.plan, pass.rows_per_pass);
    FQ_RETURN_IF_ERROR(Grow(std::max<int64_t>(num_bytes, 16), backend_, &workspace_));
  }
  int64_t counters = layout.num_strips;
  if (rows_.many_rows > 0) {
    FQ_RETURN_IF_ERROR(Grow(LinearManyRowsWorkspaceBytes(rows_.many_rows, device_.num_sms),
                            backend_, &workspace_));
    counters = std::max(counters, LinearManyRowsCounters(layout, rows_.many_rows));
  }
  return Grow(counters * int64_t{sizeof(uint32_t)}, backend_, &counters_);
}

absl::Status FusedLinear::Run(const FusedWeight& weight, int32_t num_rows, const void* x, void* y) {
  FQ_RETURN_IF_ERROR(Multiply(weight, num_rows, x, y));
  if (weight.bias.num_bytes() == 0) return absl::OkStatus();
  return ToStatus(LaunchAddBias(weight.bias.data(), num_rows, weight.layout.n, y, stream_),
                  "linear bias");
}

absl::Status FusedLinear::RunToFloat(const FusedWeight& weight, int32_t num_rows, const void* x,
                                     float* y) {
  constexpr int64_t kElementBytes = sizeof(BFloat16);
  const int64_t n = weight.layout.n;
  const int32_t rows_at_once = std::min(num_rows, kRowsToFloat);
  FQ_RETURN_IF_ERROR(Grow(rows_at_once * n * kElementBytes, backend_, &rounded_));
  for (int32_t row = 0; row < num_rows; row += rows_at_once) {
    const int32_t count = std::min(rows_at_once, num_rows - row);
    const auto* rows = static_cast<const uint8_t*>(x) + row * weight.layout.k * kElementBytes;
    FQ_RETURN_IF_ERROR(Multiply(weight, count, rows, rounded_.data()));
    FQ_RETURN_IF_ERROR(
        ToStatus(LaunchWiden(rounded_.data(), weight.bias.data(), count, n, y + row * n, stream_),
                 "linear to FP32"));
  }
  return absl::OkStatus();
}

absl::Status FusedLinear::Multiply(const FusedWeight& weight, int32_t num_rows, const void* x,
                                   void* y) {
  staging_ = DeviceBuffer();  // layers have been loaded
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
  if (num_rows > rows_.passes && num_rows <= rows_.many_rows) {
    return ToStatus(LaunchLinearManyRows(params, stream_), "linear_w4a16 for many rows");
  }
  return ToStatus(LaunchLinearW4A16(params, stream_), "linear_w4a16");
}

absl::StatusOr<const void*> FusedLinear::Unpack(const FusedWeight& weight,
                                                const StripRange& strips) {
  const int64_t num_bytes = int64_t{UnpackStripsAtOnce(weight.layout)} * kStripN * weight.layout.k *
                            int64_t{sizeof(BFloat16)};
  FQ_RETURN_IF_ERROR(Grow(num_bytes, backend_, &matrix_));
  FQ_RETURN_IF_ERROR(ToStatus(
      LaunchUnpackWeight(weight.layout, weight.bytes.As<uint8_t>(),
                         unpack_tables_.As<UnpackTables>(), strips, matrix_.data(), stream_),
      "unpacking a weight"));
  return matrix_.data();
}

}  // namespace flashquant::cuda
