// Backend: device memory and one virtual function per op; all that engine/ sees of a device.
//
// One object per device, used from one thread (the engine thread). Ops are queued in order on one
// stream and may return before they ran: results are readable after Synchronize. The CPU backend
// runs them at once.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/tensor_view.h"
#include "kernels/format/int4_weight.h"
#include "kernels/format/tile_coo.h"
#include "kernels/op_params.h"

namespace flashquant {

class Backend;

// Owning backend memory, zero-filled when made, 256-byte aligned; freed through its backend, which
// it must not outlive.
class DeviceBuffer final {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Backend* backend, void* data, int64_t num_bytes)
      : backend_(backend), data_(data), num_bytes_(num_bytes) {}
  ~DeviceBuffer() { Reset(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return data_; }
  template <typename T>
  T* As() const {
    return static_cast<T*>(data_);
  }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void Reset();

  Backend* backend_ = nullptr;
  void* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

// One part of a linear layer in host memory, canonical bytes; only read during PackLinear. Either
// `dense` is set, BF16 / F16 / F32 [N, K] or I8 [N, K] with `row_scales` BF16 [N] (value = scale *
// code); or `int4` is, with `outliers` when the layer has any.
struct LinearPart {
  TensorView dense;
  const BFloat16* row_scales = nullptr;
  const Int4Weight* int4 = nullptr;
  const TileCooMatrix* outliers = nullptr;
  const BFloat16* bias = nullptr;  // [N] or null

  int64_t n() const { return int4 != nullptr ? int4->n : dense.shape[0]; }
  int64_t k() const { return int4 != nullptr ? int4->k : dense.shape[1]; }
};

// A linear layer's weight in the backend's own packed form; also an embedding table when dense.
class LinearWeight {
 public:
  virtual ~LinearWeight() = default;
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  // Bytes that one pass over the weight reads: codes, scales, zero points, outliers, padding
  // included.
  int64_t num_bytes() const { return num_bytes_; }

 protected:
  LinearWeight(int64_t n, int64_t k, int64_t num_bytes) : n_(n), k_(k), num_bytes_(num_bytes) {}

 private:
  const int64_t n_;
  const int64_t k_;
  const int64_t num_bytes_;
};

struct BackendInfo {
  std::string name;                      // "cpu" or "cuda"
  std::string device;                    // for people: "16 threads, AVX-512" or the card's name
  DType activation_dtype = DType::kF32;  // FP32 on the CPU, BF16 on CUDA
  DType kv_dtype = DType::kF32;          // BackendOptions::kv_cache_dtype
  int32_t row_multiple = 1;              // decode batches run best padded to this many rows
  int64_t free_memory_bytes = 0;         // what a KV pool may be cut from
  bool records_ops = false;              // whether RunRecorded makes ops cheaper to queue
  // Whether the last bits of a row do not depend on how many rows an op has.
  bool exact_rows = true;
  // Of a device with memory of its own; else 0 and empty.
  int64_t total_memory_bytes = 0;
  // What its free memory has lost since the backend was opened, to whomever.
  int64_t taken_memory_bytes = 0;
  std::string pci_bus_id;  // "0000:0d:00.0"
};

// Read-backs that may be under way at once: one of each of two steps in flight.
inline constexpr int32_t kNumReadBackSlots = 2;
// Moments of a step that RecordMark keeps.
inline constexpr int32_t kNumMarks = 4;

class Backend {
 public:
  virtual ~Backend() = default;
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  virtual BackendInfo info() const = 0;

  // RESOURCE_EXHAUSTED when the memory is not there. num_bytes may be 0.
  virtual absl::StatusOr<DeviceBuffer> Allocate(int64_t num_bytes) = 0;
  // In order with the ops; `host` may change as soon as this returns.
  virtual absl::Status CopyToDevice(void* device, const void* host, int64_t num_bytes) = 0;
  virtual absl::Status CopyToHost(void* host, const void* device, int64_t num_bytes) = 0;
  // A copy to the host that later ops do not hold up: QueueReadBack takes what `device` holds once
  // everything queued so far has run, FinishReadBack waits for that alone and writes it to `host`.
  // `slot`: 0 to kNumReadBackSlots - 1, free again after FinishReadBack.
  virtual absl::Status QueueReadBack(int32_t slot, const void* device, int64_t num_bytes);
  virtual absl::Status FinishReadBack(int32_t slot, void* host);
  // Notes when everything queued so far has run, by the device's clock. `slot`: of the read-back
  // that will be queued behind it; `mark`: 0 to kNumMarks - 1. Not while ops are recorded.
  virtual absl::Status RecordMark(int32_t slot, int32_t mark);
  // Seconds from `first` to `last`, marks of a slot whose read-back has been finished.
  virtual double SecondsBetweenMarks(int32_t slot, int32_t first, int32_t last) const;
  // Waits for everything queued. An error here is final for the device.
  virtual absl::Status Synchronize() = 0;

  // Joins the parts along N, in order, into one packed weight; all have the same K.
  // INVALID_ARGUMENT for a layout that the backend does not know.
  virtual absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(
      std::span<const LinearPart> parts) = 0;

  virtual absl::Status Embedding(const EmbeddingParams& params) = 0;
  virtual absl::Status RmsNorm(const RmsNormParams& params) = 0;
  virtual absl::Status Linear(const LinearParams& params) = 0;
  virtual absl::Status RopeAndKvWrite(const RopeAndKvWriteParams& params) = 0;
  virtual absl::Status PagedAttention(const PagedAttentionParams& params) = 0;
  virtual absl::Status SiluAndMul(const SiluAndMulParams& params) = 0;
  virtual absl::Status GatherRows(const GatherRowsParams& params) = 0;
  virtual absl::Status SampleTokens(const SampleTokensParams& params) = 0;
  virtual absl::Status LayerNorm(const LayerNormParams& params) = 0;
  virtual absl::Status HeadNorm(const HeadNormParams& params) = 0;
  virtual absl::Status AddPositions(const AddPositionsParams& params) = 0;
  virtual absl::Status Relu(const ReluParams& params) = 0;
  // RopeAndKvWrite and then PagedAttention of the same rows and layer. A backend may do both at
  // once, and then need not leave q and k rotated in qkv.
  virtual absl::Status RopeAndAttention(const RopeAndKvWriteParams& rope,
                                        const PagedAttentionParams& attention);

  // Runs the ops that `queue` queues. A backend may record them and, when it is called with the
  // same owner and key again, queue what was recorded instead of calling `queue`: for the same
  // owner and key those must be the same ops with the same sizes and pointers, and with no copies
  // from or to the host; of PlanAttention's arrays only the number of sequences counts, of which
  // none may have more than one row. Memory that is freed ends every recording.
  virtual absl::Status RunRecorded(const void* owner, int64_t key,
                                   const std::function<absl::Status()>& queue);

  // Host copies of a step's attention arrays, once per step before the first PagedAttention: where
  // a backend plans its work split. Nothing to do on the CPU.
  virtual absl::Status PlanAttention(const AttentionBatch& host_batch);

 protected:
  friend class DeviceBuffer;
  virtual void Free(void* data, int64_t num_bytes) = 0;

 private:
  // Of the default versions.
  using Moments = std::array<std::chrono::steady_clock::time_point, kNumMarks>;
  std::array<std::vector<uint8_t>, kNumReadBackSlots> read_backs_;
  std::array<Moments, kNumReadBackSlots> marks_{};
};

// What every backend asks of the parts of one linear layer: at least one, equal K, sizes from 1 to
// 2^31 - 1, a dense dtype that LinearPart names, row scales with I8, outliers of the weight's
// shape. INVALID_ARGUMENT otherwise; DATA_LOSS for a broken INT4 weight.
absl::Status CheckLinearParts(std::span<const LinearPart> parts);

}  // namespace flashquant
