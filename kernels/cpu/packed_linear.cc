#include "kernels/cpu/packed_linear.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr float kMaxOutlier = 0x1p100f;

struct OutlierEntry {
  int64_t n = 0;
  int64_t k = 0;
  uint16_t bits = 0;
};

// Where the word that holds (n, k) stands in `words`.
int64_t WordIndex(const PackedSegment& segment, int64_t n, int64_t k) {
  return n / kBlockLanes * segment.words_per_block + k / CodesPerWord(segment.kind) * kBlockLanes +
         n % kBlockLanes;
}

absl::Status AllocateWords(PackedSegment& segment, int64_t n, int64_t k) {
  segment.n = n;
  segment.num_blocks = CeilDiv(n, kBlockLanes);
  segment.words_per_block = RoundUp(k, kPackedKMultiple) / CodesPerWord(segment.kind) * kBlockLanes;
  FQ_ASSIGN_OR_RETURN(
      segment.words,
      HostMemory::Create(segment.num_blocks * segment.words_per_block * int64_t{sizeof(uint32_t)}));
  return absl::OkStatus();
}

absl::Status PackBias(const LinearPart& part, PackedSegment& segment) {
  if (part.bias == nullptr) return absl::OkStatus();
  FQ_ASSIGN_OR_RETURN(
      segment.bias, HostMemory::Create(segment.num_blocks * kBlockLanes * int64_t{sizeof(float)}));
  float* bias = segment.bias.As<float>();
  for (int64_t n = 0; n < segment.n; ++n) bias[n] = ToFloat(part.bias[n]);
  return absl::OkStatus();
}

void PackCodes(const Int4Weight& weight, PackedSegment& segment) {
  uint32_t* words = segment.words.As<uint32_t>();
  const int64_t row_bytes = weight.k_padded / 2;
  const int64_t used_bytes = std::min(row_bytes, RoundUp(weight.k, kPackedKMultiple) / 2);
  for (int64_t n = 0; n < weight.n; ++n) {
    const uint8_t* row = weight.qweight.data() + n * row_bytes;
    uint32_t* lane = words + WordIndex(segment, n, 0);
    for (int64_t byte = 0; byte < used_bytes; ++byte) {
      lane[byte / 4 * kBlockLanes] |= static_cast<uint32_t>(row[byte]) << (byte % 4 * 8);
    }
  }
}

absl::Status PackGroups(const Int4Weight& weight, PackedSegment& segment) {
  const int64_t groups = segment.one_group ? 1 : CeilDiv(weight.k, weight.group_size);
  segment.scales_per_block = groups * kBlockLanes;
  const int64_t num_scales = segment.num_blocks * segment.scales_per_block;
  FQ_ASSIGN_OR_RETURN(segment.scales, HostMemory::Create(num_scales * int64_t{sizeof(BFloat16)}));
  if (!segment.symmetric) {
    FQ_ASSIGN_OR_RETURN(segment.zeros, HostMemory::Create(num_scales));
  }
  for (int64_t n = 0; n < weight.n; ++n) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t to =
          n / kBlockLanes * segment.scales_per_block + group * kBlockLanes + n % kBlockLanes;
      segment.scales.As<BFloat16>()[to] =
          weight.scales[static_cast<size_t>(n * weight.groups_per_row() + group)];
      if (!segment.symmetric) {
        segment.zeros.As<uint8_t>()[to] = static_cast<uint8_t>(weight.ZeroPoint(n, group));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<OutlierEntry>> CollectOutliers(const TileCooMatrix& matrix) {
  std::vector<OutlierEntry> entries;
  entries.reserve(static_cast<size_t>(matrix.num_slots()));
  bool in_range = true;
  matrix.ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
    in_range = in_range && std::fabs(ToFloat(BFloat16{bits})) < kMaxOutlier;
    entries.push_back({n, k, bits});
  });
  if (!in_range) return UnimplementedError("outlier value of 2^100 or more");
  std::sort(entries.begin(), entries.end(), [](const OutlierEntry& a, const OutlierEntry& b) {
    return std::tie(a.n, a.k) < std::tie(b.n, b.k);
  });
  return entries;
}

absl::Status PackOutliers(const LinearPart& part, int64_t k, PackedSegment& segment) {
  if (part.outliers == nullptr) return absl::OkStatus();
  const TileCooGeometry& geometry = part.outliers->geometry();
  if (geometry.value_type != TileCooValueType::kBFloat16) {
    return UnimplementedError("outlier values are FP16; the CPU backend takes BF16");
  }
  if (k > kMaxOutlierInputs) {
    return UnimplementedError("outliers with K {}; at most {}", k, kMaxOutlierInputs);
  }
  FQ_ASSIGN_OR_RETURN(const std::vector<OutlierEntry> entries, CollectOutliers(*part.outliers));
  const int64_t num_lanes = segment.num_blocks * kBlockLanes;
  FQ_ASSIGN_OR_RETURN(segment.lane_indptr,
                      HostMemory::Create((num_lanes + 1) * int64_t{sizeof(uint32_t)}));
  uint32_t* indptr = segment.lane_indptr.As<uint32_t>();
  for (const OutlierEntry& entry : entries) ++indptr[entry.n + 1];
  for (int64_t lane = 0; lane < num_lanes; ++lane) {
    indptr[lane + 1] = indptr[lane] + CeilDiv<uint32_t>(indptr[lane + 1], 4);
  }
  FQ_ASSIGN_OR_RETURN(segment.outliers, HostMemory::Create((int64_t{indptr[num_lanes]} + 1) *
                                                           int64_t{sizeof(OutlierQuad)}));
  int64_t lane = -1;
  int64_t place = 0;  // slot of the lane
  for (const OutlierEntry& entry : entries) {
    place = entry.n == lane ? place + 1 : 0;
    lane = entry.n;
    OutlierQuad& quad = segment.outliers.As<OutlierQuad>()[indptr[lane] + place / 4];
    float value = ToFloat(BFloat16{entry.bits});
    if (segment.kind == PackedKind::kInt4) {
      value = std::ldexp(value, static_cast<int>(4 * (entry.k % kNibblePhases)));
    }
    quad.k[place % 4] = static_cast<uint16_t>(entry.k);
    quad.value[place % 4] = ToBFloat16(value);  // exact: a power of two
  }
  return absl::OkStatus();
}

absl::StatusOr<PackedSegment> PackInt4(const LinearPart& part) {
  const Int4Weight& weight = *part.int4;
  PackedSegment segment;
  segment.kind = PackedKind::kInt4;
  segment.symmetric = weight.symmetric;
  segment.one_group = weight.groups_per_row() == 1;
  segment.chunk_inputs = std::min(weight.group_size, kMaxChunkInputs);
  if (!segment.one_group &&
      (weight.group_size > kMaxChunkInputs || weight.group_size % kPackedKMultiple != 0)) {
    return InvalidArgumentError("group size {}; 32, 64, 128 or one group per row",
                                weight.group_size);
  }
  if (segment.one_group) segment.chunk_inputs = kMaxChunkInputs;
  FQ_RETURN_IF_ERROR(AllocateWords(segment, weight.n, weight.k));
  PackCodes(weight, segment);
  FQ_RETURN_IF_ERROR(PackGroups(weight, segment));
  FQ_RETURN_IF_ERROR(PackOutliers(part, weight.k, segment));
  return segment;
}

uint32_t FloatBits(float value) { return std::bit_cast<uint32_t>(value); }

// One weight's bits at the low end of a word.
uint32_t DenseBits(const TensorView& dense, int64_t index) {
  switch (dense.dtype) {
    case DType::kBF16:
      return dense.As<BFloat16>()[index].bits;
    case DType::kF16:
      return FloatBits(ToFloat(dense.As<Half>()[index]));
    case DType::kI8:
      return static_cast<uint8_t>(dense.As<int8_t>()[index]);
    default:
      return FloatBits(dense.As<float>()[index]);
  }
}

PackedKind DenseKind(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return PackedKind::kBFloat16;
    case DType::kI8:
      return PackedKind::kInt8;
    default:
      return PackedKind::kFloat32;
  }
}

absl::StatusOr<PackedSegment> PackDense(const LinearPart& part) {
  PackedSegment segment;
  segment.kind = DenseKind(part.dense.dtype);
  const int64_t n = part.dense.shape[0];
  const int64_t k = part.dense.shape[1];
  segment.chunk_inputs = kMaxChunkInputs;
  FQ_RETURN_IF_ERROR(AllocateWords(segment, n, k));
  uint32_t* words = segment.words.As<uint32_t>();
  const int64_t per_word = CodesPerWord(segment.kind);
  const auto bits = static_cast<int>(32 / per_word);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t col = 0; col < k; ++col) {
      words[WordIndex(segment, row, col)] |= DenseBits(part.dense, row * k + col)
                                             << (static_cast<int>(col % per_word) * bits);
    }
  }
  if (segment.kind == PackedKind::kInt8) {
    segment.scales_per_block = kBlockLanes;
    FQ_ASSIGN_OR_RETURN(segment.scales, HostMemory::Create(segment.num_blocks * kBlockLanes *
                                                           int64_t{sizeof(BFloat16)}));
    std::copy_n(part.row_scales, n, segment.scales.As<BFloat16>());
  }
  FQ_RETURN_IF_ERROR(PackOutliers(part, k, segment));
  return segment;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedLinear>> MakePackedLinear(std::span<const LinearPart> parts) {
  FQ_RETURN_IF_ERROR(CheckLinearParts(parts));
  const int64_t k = parts[0].k();
  std::vector<PackedSegment> segments;
  int64_t n = 0;
  int64_t num_bytes = 0;
  for (const LinearPart& part : parts) {
    FQ_ASSIGN_OR_RETURN(PackedSegment segment,
                        part.int4 != nullptr ? PackInt4(part) : PackDense(part));
    FQ_RETURN_IF_ERROR(PackBias(part, segment));
    segment.n_begin = n;
    n += segment.n;
    num_bytes += segment.num_bytes();
    segments.push_back(std::move(segment));
  }
  return std::make_unique<PackedLinear>(n, k, num_bytes, std::move(segments));
}

}  // namespace flashquant
