// The linear op's outer part: interleaves x, cuts the layer into tasks and runs them.
#include <algorithm>
#include <array>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_kernels.h"

namespace flashquant {
namespace {

// Tasks per thread: more even out a thread that is interrupted, each costs a claim.
constexpr int64_t kTasksPerThread = 4;
// Blocks that a kernel works on together.
constexpr int64_t kBlocksPerTask = 4;
// Less work than this (rows x inputs) is not worth waking the pool for.
constexpr int64_t kParallelInterleave = 32768;

// 1 / 16^(k % 4)
constexpr std::array<float, kNibblePhases> kNibbleFactors = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f};

// What a layer's segments need of x.
struct InputForms {
  bool plain = false;
  bool scaled = false;                // FP32 for INT4 segments, or for their outliers
  bool digits = false;                // INT4 segments take digits
  std::vector<int64_t> chunk_inputs;  // distinct sizes of INT4 segments, with sums of their own
};

InputForms FormsFor(const PackedLinear& weight) {
  InputForms forms;
  forms.digits = TakesDigits();
  for (const PackedSegment& segment : weight.segments()) {
    if (segment.kind != PackedKind::kInt4) {
      forms.plain = true;
      continue;
    }
    forms.scaled = forms.scaled || !forms.digits || segment.outliers.num_bytes() > 0;
    if (std::find(forms.chunk_inputs.begin(), forms.chunk_inputs.end(), segment.chunk_inputs) ==
        forms.chunk_inputs.end()) {
      forms.chunk_inputs.push_back(segment.chunk_inputs);
    }
  }
  return forms;
}

// Where each form lies in the scratch.
struct InputLayout {
  float* plain = nullptr;
  float* scaled = nullptr;
  std::vector<float*> sums;      // as InputForms::chunk_inputs
  std::vector<int32_t*> digits;  // the same
};

struct InterleaveTask {
  const float* x = nullptr;  // first row
  int64_t num_rows = 0;      // 1 to 8
  int64_t k = 0;
  float* to = nullptr;  // [k_packed][stride]; padding stays zero
};

// A row of the chunk; for padding rows, whose results are not stored, any real one.
const float* RowOf(const InterleaveTask& task, int64_t row) {
  return task.x + (row < task.num_rows ? row : 0) * task.k;
}

template <int64_t kStride, bool kScaled>
void Interleave(const InterleaveTask& task) {
  std::array<const float*, kStride> rows;
  for (int64_t row = 0; row < kStride; ++row) rows[static_cast<size_t>(row)] = RowOf(task, row);
  float* to = task.to;
  for (int64_t k = 0; k < task.k; ++k, to += kStride) {
    const float factor = kScaled ? kNibbleFactors[static_cast<size_t>(k % kNibblePhases)] : 1.0f;
    for (size_t row = 0; row < static_cast<size_t>(kStride); ++row) to[row] = rows[row][k] * factor;
  }
  std::fill(to, task.to + RoundUp(task.k, kPackedKMultiple) * kStride, 0.0f);
}

// Sums of x over each chunk of inputs, along k.
template <int64_t kStride>
void SumChunks(const InterleaveTask& task, int64_t chunk_inputs) {
  int64_t chunk = 0;
  for (int64_t begin = 0; begin < task.k; begin += chunk_inputs, ++chunk) {
    const int64_t end = std::min(begin + chunk_inputs, task.k);
    for (int64_t row = 0; row < kStride; ++row) {
      const float* from = RowOf(task, row);
      float sum = 0.0f;
      for (int64_t k = begin; k < end; ++k) sum += from[k];
      task.to[chunk * 2 * kStride + row] = sum;
    }
  }
}

template <int64_t kStride>
void MakeDigits(const InterleaveTask& task, int64_t chunk_inputs, int32_t* digits) {
  for (int64_t row = 0; row < kStride; ++row) {
    DigitRow digit_row;
    digit_row.k = task.k;
    digit_row.chunk_inputs = chunk_inputs;
    digit_row.stride = kStride;
    digit_row.digits = digits + 4 * row;
    digit_row.sums = task.to + row;
    digit_row.x = RowOf(task, row);
    MakeRowDigits(digit_row);
  }
}

template <int64_t kStride>
void PrepareChunk(const InterleaveTask& task, const InputForms& forms, const InputLayout& layout,
                  int64_t first_row, int64_t k_packed) {
  InterleaveTask part = task;
  if (forms.plain) {
    part.to = layout.plain + first_row * k_packed;
    Interleave<kStride, false>(part);
  }
  if (forms.scaled) {
    part.to = layout.scaled + first_row * k_packed;
    Interleave<kStride, true>(part);
  }
  for (size_t i = 0; i < forms.chunk_inputs.size(); ++i) {
    const int64_t chunk_inputs = forms.chunk_inputs[i];
    part.to = layout.sums[i] + 2 * first_row * CeilDiv(k_packed, chunk_inputs);
    if (forms.digits) {
      MakeDigits<kStride>(part, chunk_inputs, layout.digits[i] + first_row * k_packed);
    } else {
      SumChunks<kStride>(part, chunk_inputs);
    }
  }
}

absl::StatusOr<InputLayout> LayOut(const InputForms& forms, int64_t num_rows, int64_t k_packed,
                                   HostMemory& memory) {
  const int64_t rows = RoundUp(num_rows, kRowsPerChunk);
  const int64_t copies = (forms.plain ? 1 : 0) + (forms.scaled ? 1 : 0) +
                         (forms.digits ? static_cast<int64_t>(forms.chunk_inputs.size()) : 0);
  int64_t words = copies * rows * k_packed;
  for (const int64_t inputs : forms.chunk_inputs) words += 2 * rows * CeilDiv(k_packed, inputs);
  const int64_t num_bytes = words * int64_t{sizeof(float)};
  if (num_bytes > memory.num_bytes()) {
    FQ_ASSIGN_OR_RETURN(memory, HostMemory::Create(num_bytes));
  }
  InputLayout layout;
  char* next = memory.As<char>();
  const auto take = [&next](int64_t count) {
    char* const from = next;
    next += count * int64_t{sizeof(float)};
    return from;
  };
  if (forms.plain) layout.plain = reinterpret_cast<float*>(take(rows * k_packed));
  if (forms.scaled) layout.scaled = reinterpret_cast<float*>(take(rows * k_packed));
  for (const int64_t inputs : forms.chunk_inputs) {
    if (forms.digits) {
      layout.digits.push_back(reinterpret_cast<int32_t*>(take(rows * k_packed)));
    }
    layout.sums.push_back(reinterpret_cast<float*>(take(2 * rows * CeilDiv(k_packed, inputs))));
  }
  return layout;
}

void PrepareInputs(const LinearParams& params, const PackedLinear& weight, const InputForms& forms,
                   const InputLayout& layout, ThreadPool& pool) {
  const auto prepare = [&](int64_t chunk, int32_t /*thread*/) {
    const int64_t first_row = chunk * kRowsPerChunk;
    InterleaveTask task;
    task.num_rows = std::min<int64_t>(kRowsPerChunk, params.num_rows - first_row);
    task.k = weight.k();
    task.x = static_cast<const float*>(params.x) + first_row * task.k;
    const int64_t k_packed = weight.k_packed();
    switch (RowStride(task.num_rows)) {
      case 1:
        return PrepareChunk<1>(task, forms, layout, first_row, k_packed);
      case 2:
        return PrepareChunk<2>(task, forms, layout, first_row, k_packed);
      case 4:
        return PrepareChunk<4>(task, forms, layout, first_row, k_packed);
      default:
        return PrepareChunk<8>(task, forms, layout, first_row, k_packed);
    }
  };
  const int64_t chunks = CeilDiv<int64_t>(params.num_rows, kRowsPerChunk);
  if (params.num_rows * weight.k() < kParallelInterleave) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) prepare(chunk, 0);
  } else {
    pool.ParallelFor(chunks, prepare);
  }
}

// Cuts one segment into tasks: by channels, and by rows where those are too few for the threads.
void AddTasks(const LinearTask& whole, int64_t wanted_tasks, std::vector<LinearTask>& tasks) {
  const int64_t num_blocks = whole.segment->num_blocks;
  const int64_t task_blocks =
      RoundUp(std::max<int64_t>(1, num_blocks / wanted_tasks), kBlocksPerTask);
  const int64_t block_tasks = CeilDiv(num_blocks, task_blocks);
  const int64_t chunks = CeilDiv(whole.end_row, kRowsPerChunk);
  const int64_t row_parts = std::min(chunks, CeilDiv(wanted_tasks, block_tasks));
  const int64_t task_rows = CeilDiv(chunks, row_parts) * kRowsPerChunk;
  for (int64_t block = 0; block < num_blocks; block += task_blocks) {
    for (int64_t row = 0; row < whole.end_row; row += task_rows) {
      LinearTask task = whole;
      task.first_block = block;
      task.end_block = std::min(block + task_blocks, num_blocks);
      task.first_row = row;
      task.end_row = std::min(row + task_rows, whole.end_row);
      tasks.push_back(task);
    }
  }
}

}  // namespace

absl::Status LinearCpu(const LinearParams& params, ThreadPool& pool, LinearScratch& scratch) {
  const auto& weight = static_cast<const PackedLinear&>(*params.weight);
  const InputForms forms = FormsFor(weight);
  FQ_ASSIGN_OR_RETURN(const InputLayout layout,
                      LayOut(forms, params.num_rows, weight.k_packed(), scratch.x));
  PrepareInputs(params, weight, forms, layout, pool);

  scratch.tasks.clear();
  const int64_t wanted_tasks = pool.num_threads() == 1 ? 1 : pool.num_threads() * kTasksPerThread;
  for (const PackedSegment& segment : weight.segments()) {
    LinearTask task;
    task.segment = &segment;
    task.k_packed = weight.k_packed();
    task.num_tiles = weight.num_tiles();
    task.end_row = params.num_rows;
    task.x = layout.plain;
    if (segment.kind == PackedKind::kInt4) {
      task.x = layout.scaled;
      const auto form =
          std::find(forms.chunk_inputs.begin(), forms.chunk_inputs.end(), segment.chunk_inputs);
      const auto index = static_cast<size_t>(form - forms.chunk_inputs.begin());
      task.x_sums = layout.sums[index];
      if (forms.digits) task.x_digits = layout.digits[index];
    }
    task.k_chunks = CeilDiv(task.k_packed, segment.chunk_inputs);
    task.y = static_cast<float*>(params.y);
    task.y_stride = weight.n();
    AddTasks(task, wanted_tasks, scratch.tasks);
  }
  pool.ParallelFor(static_cast<int64_t>(scratch.tasks.size()), [&](int64_t i, int32_t /*thread*/) {
    const LinearTask& task = scratch.tasks[static_cast<size_t>(i)];
    task.segment->kind == PackedKind::kInt4 ? RunInt4Task(task) : RunDenseTask(task);
  });
  return absl::OkStatus();
}

}  // namespace flashquant
