// Import of a Llama model from a GGUF file: the same Checkpoint that a Hugging Face folder gives.
// Used by the quantizer only; nothing is served from a GGUF file.
//
// Tensors get Hugging Face's names and shapes; block types are delivered as F32. GGUF stores the
// rows of q_proj and k_proj reordered for rotary embeddings of neighbouring pairs; that is undone.
// config.json is made from the metadata. The tokenizer is gguf_tokenizer.h.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/checkpoint/gguf_file.h"

namespace flashquant {

// NOT_FOUND, PERMISSION_DENIED; DATA_LOSS for anything malformed, UNIMPLEMENTED for another
// architecture, tensor, tensor type or rotary scaling than those of Llama.
absl::StatusOr<Checkpoint> OpenGguf(const std::string& path);

// OpenGguf for a file that starts like one or is called so, OpenCheckpoint for all else, whose
// layers are dequantized when it is a GPTQ folder (gptq_reader.h).
absl::StatusOr<Checkpoint> CheckpointFromPath(const std::string& path);

// Takes the tokenizer of a Hugging Face folder (the files that are there) or of a GGUF file (made
// from its metadata) along to the output. UNIMPLEMENTED for a tokenizer kind that we do not know.
absl::Status CopyTokenizerFiles(const std::string& path, CheckpointWriter* writer);

}  // namespace flashquant
