// The header of a GGUF file, versions 2 and 3, little-endian: metadata and tensor directory. What
// the keys and tensors mean is gguf_reader.h, the block types are gguf_blocks.h.
//
// Source: the GGUF specification in the ggml project, read for the layout alone. Every count is
// compared with the bytes left in the file before anything is allocated; products, sums and the
// rounding to the alignment are checked.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/gguf_blocks.h"

namespace flashquant {

// One metadata value. Integers of every width are int64_t (a larger u64 is refused), F32 is widened
// through its shortest decimal form (1e-05, not 9.99999975e-06); arrays are of one of three kinds.
using GgufValue = std::variant<int64_t, double, bool, std::string, std::vector<int64_t>,
                               std::vector<double>, std::vector<std::string>>;

struct GgufTensor {
  std::string name;
  GgufType type = GgufType::kF32;
  std::vector<int64_t>
      shape;  // slowest dimension first, as Hugging Face writes it (reverse of GGUF)
  int64_t num_bytes = 0;
  int64_t file_offset = 0;
  // Bytes of one row, that is of everything but the first dimension (of one element for a vector).
  int64_t row_bytes = 0;
};

using GgufMetadata = std::map<std::string, GgufValue, std::less<>>;

// Fills both, the tensors sorted by name, each inside the file and none over another. DATA_LOSS for
// anything malformed; UNIMPLEMENTED for another version, a big-endian file and a tensor type that
// is not imported.
absl::Status ParseGgufHeader(const FileReader& file, GgufMetadata* metadata,
                             std::vector<GgufTensor>* tensors);

}  // namespace flashquant
