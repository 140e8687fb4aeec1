// Regular expressions by which tokenizers split text before merging, where more than one part of
// the engine must spell them alike. Source: the tokenizer.json files of the models.
#pragma once

#include <string_view>

namespace flashquant {

// Llama 3: the importer writes it, the tokenizer knows it by its text.
inline constexpr std::string_view kLlama3SplitRegex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

}  // namespace flashquant
