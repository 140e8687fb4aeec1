#include "engine/tools/imported_model.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "engine/checkpoint/gguf_reader.h"
#include "engine/checkpoint/gguf_tokenizer.h"
#include "engine/tokenizer/tokenizer_loader.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

absl::StatusOr<std::unique_ptr<Tokenizer>> TokenizerOf(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return LoadTokenizer(path);
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> gguf, GgufFile::Open(path));
  FQ_ASSIGN_OR_RETURN(GgufTokenizerFiles files, TokenizerFromGguf(*gguf));
  TokenizerFiles texts;
  if (!files.tokenizer_json.empty()) texts.tokenizer_json = std::move(files.tokenizer_json);
  if (!files.tokenizer_model.empty()) texts.tokenizer_model = std::move(files.tokenizer_model);
  texts.tokenizer_config = std::move(files.tokenizer_config_json);
  return MakeTokenizer(texts);
}

absl::StatusOr<LoadedModel> LoadAnyModel(const std::string& path, int32_t context_length,
                                         const BackendOptions& backend_options) {
  FQ_ASSIGN_OR_RETURN(Checkpoint checkpoint, CheckpointFromPath(path));
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return LoadModel(checkpoint, context_length, backend_options, nullptr);
  }
  // A file's tokenizer is in the file: as a folder that is not there it has none of its own.
  checkpoint.path += ".files";
  FQ_ASSIGN_OR_RETURN(LoadedModel loaded,
                      LoadModel(checkpoint, context_length, backend_options, nullptr));
  FQ_ASSIGN_OR_RETURN(loaded.tokenizer, TokenizerOf(path));
  loaded.path = path;
  return loaded;
}

}  // namespace flashquant
